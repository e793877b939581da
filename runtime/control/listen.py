"""Listening at an endpoint, or saying why that cannot be."""

import zmq

from penstock.runtime.control.endpoints import bind_fault, socket_file


class WireError(OSError):
    """An address that cannot be listened on: the user's fault, or another process's. `strerror` says all of it."""


def listen(socket: zmq.Socket[bytes], endpoint: str) -> str:
    """Bind the socket; where it really listens. A Unix socket is its owner's alone. Raises WireError."""
    file = socket_file(endpoint)
    try:
        socket.bind(endpoint)
        if file is not None:
            file.chmod(0o600)
    except zmq.ZMQError as error:
        raise WireError(error.errno or 0, f"cannot listen on {endpoint}: {bind_fault(error.errno)}") from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def try_endpoint(endpoint: str) -> None:
    """Listen on a tcp endpoint for a moment. Raises WireError."""
    context = zmq.Context()
    try:
        listen(context.socket(zmq.ROUTER), endpoint)
    finally:
        context.destroy(linger=0)

"""CURVE: key pairs, and the gate that lets only listed keys in (ZAP, rfc.zeromq.org/spec/27)."""

from collections.abc import Callable, Iterable

import zmq
from zmq.utils import z85

_ZAP = "inproc://zeromq.zap.01"


def new_pair() -> tuple[str, str]:
    """A new public and secret key, in Z85."""
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


class Gate:
    """Locks a server's socket. `socket` must be polled: a connection waits until `answer` was called.

    libzmq asks about each key. Should this not answer, no connection is let in. `refused` is told the address of a
    client whose key is not on the list. Each message of a client that is let in carries its public key in Z85 as the
    property "User-Id": libzmq has proved that the client has the secret one.
    """

    def __init__(
        self, server: zmq.Socket[bytes], secret: str, allowed: Iterable[str], refused: Callable[[str], None]
    ) -> None:
        self._allowed = {z85.decode(public.encode()) for public in allowed}
        self._refused = refused
        self.socket: zmq.Socket[bytes] = server.context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ZAP)
        server.setsockopt(zmq.ZAP_DOMAIN, b"penstock")
        server.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        server.setsockopt(zmq.CURVE_SERVER, 1)
        server.setsockopt(zmq.CURVE_SECRETKEY, secret.encode())

    def answer(self) -> None:
        """Answer one question of libzmq."""
        version, number, _, address, _, mechanism, *keys = self.socket.recv_multipart()
        known = mechanism == b"CURVE" and len(keys) == 1 and keys[0] in self._allowed
        if not known:
            self._refused(address.decode(errors="replace"))
        verdict = [b"200", b"OK", z85.encode(keys[0])] if known else [b"400", b"not on the list", b""]
        self.socket.send_multipart([version, number, *verdict, b""])

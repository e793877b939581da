"""The addresses of a run's processes: `ipc://` on one host, `tcp://` between hosts.

A host may be given by its name. Files and messages keep the name; it is looked up (`resolved`) on the machine that uses
it."""

import errno
import hashlib
import ipaddress
import os
import re
import selectors
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from time import monotonic

from penstock.host import private_folder

SOCKET_NAME = "control.sock"
# Where processes listen without a given address: other machines cannot reach it.
LOOPBACK = "127.0.0.1"
# Bytes of a Unix socket's path (sun_path, less its closing zero).
_LONGEST_PATH = 107


def ipc_endpoint(folder: Path, temporary: Path = Path("/tmp"), name: str = SOCKET_NAME, *, aside: bool = False) -> str:
    """The socket of this name in the run folder; with `aside`, or if that path is too long or not printable, a socket
    in this user's own folder in /tmp."""
    path = folder.absolute() / name
    if aside or len(os.fsencode(path)) > _LONGEST_PATH or not str(path).isprintable():
        short = hashlib.sha256(os.fsencode(path)).hexdigest()[:24]
        path = private_folder(temporary) / f"{short}.sock"
    return f"ipc://{path}"


def relay_endpoint(folder: Path, host: str, run: str, life: int, *, aside: bool = False) -> str:
    """The socket at which the ranks of a host find its agent, in the run with id `run`. Each `life` has its own: an
    agent that ends removes its socket, perhaps after its successor has come on a machine that shares the folder, or
    after the run has been resumed."""
    return ipc_endpoint(folder, name=f"agent-{host}.{run}.{life}.sock", aside=aside)


def tcp_endpoint(bind: str) -> str:
    """The endpoint of `bind`, "address:port" of one interface; port 0 (or "*") lets the system choose. Raises
    ValueError for anything else."""
    address, _, port = bind.removeprefix("tcp://").rpartition(":")
    needed = 'needed "address:port", such as "127.0.0.1:0" or "10.0.0.1:5555"'
    if ":" in address and not re.fullmatch(r"\[.*\]", address):
        raise ValueError(f'given {bind!r}, needed an IPv6 address in brackets, such as "[{address}]:{port}"')
    port = "0" if port == "*" else port
    if not address or not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise ValueError(f"given {bind!r}, {needed}")
    if address == "*" or ((ip := ip_of(address)) and ip.is_unspecified):
        raise ValueError(f"given {bind!r}, every interface of this machine; name the one that the hosts share")
    return f"tcp://{address}:{port}"


class AddressError(ValueError):
    """A host name without a usable address: the user's fault, or a name server's."""


def resolved(address: str) -> str:
    """The IP address of a host name, as this machine resolves it, IPv6 in brackets; an IP address is returned
    unchanged. Raises AddressError."""
    if ip_of(address):
        return address
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError as error:
        needed = "needed a name that this machine can look up, or an IP address"
        given = f"given the host name {address!r}, which {socket.gethostname()} does not know"
        raise AddressError(f"{given} ({error.strerror or error}); {needed}") from None
    ips = [ipaddress.ip_address(str(one[4][0]).partition("%")[0]) for one in found]
    ips.sort(key=lambda ip: ip.version)
    if any(ip.is_unspecified for ip in ips):  # such as "0"
        raise AddressError(f"given {address!r}, every interface of this machine; name the one that the hosts share")
    # Many systems resolve their own name to a loopback address, which other machines cannot reach.
    outside = [ip for ip in ips if not ip.is_loopback]
    if not outside and address != "localhost":
        needed = "needed the address at which the other hosts reach it"
        raise AddressError(f"given the host name {address!r}, which is {ips[0]} on {socket.gethostname()}; {needed}")
    ip = (outside or ips)[0]
    return f"[{ip}]" if ip.version == 6 else str(ip)


def resolved_endpoint(endpoint: str) -> str:
    """A tcp endpoint, given with or without "tcp://", with its host resolved; an ipc endpoint unchanged. Raises
    AddressError."""
    if endpoint.startswith("ipc://"):
        return endpoint
    address, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return f"tcp://{resolved(address)}:{port}"


def ip_of(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """An IP address, IPv6 perhaps in brackets; None for a name, or for anything else."""
    try:
        return ipaddress.ip_address(address.strip("[]"))
    except ValueError:
        return None


def is_ipv6(endpoint: str) -> bool:
    """True for a tcp endpoint or an address of IPv6."""
    return "[" in endpoint


def own_address(endpoint: str) -> str:
    """The address of this machine as the process at a resolved endpoint would see it; nothing is sent. Raises OSError
    if there is no route to it."""
    address, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    family = socket.AF_INET6 if is_ipv6(address) else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address.strip("[]"), int(port)))
        own = str(probe.getsockname()[0])
    return f"[{own}]" if family == socket.AF_INET6 else own


# Timeout of a test connection, in seconds.
REACH_S = 5.0


def why_unreachable(endpoint: str) -> str:
    """Test the connection to a resolved tcp endpoint. Return why it fails, with both addresses; "" if it works."""
    return why_unreachable_all([endpoint])[0]


def why_unreachable_all(endpoints: Sequence[str]) -> list[str]:
    """As `why_unreachable`, for several endpoints, all tested at once, in this thread."""
    found = dict.fromkeys(range(len(endpoints)), "")
    with selectors.DefaultSelector() as trying, ExitStack() as opened:
        for number, endpoint in enumerate(endpoints):
            address, _, port = endpoint.removeprefix("tcp://").rpartition(":")
            try:
                family = socket.AF_INET6 if is_ipv6(address) else socket.AF_INET
                connection = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
                connection.setblocking(False)
                fault = connection.connect_ex((address.strip("[]"), int(port)))
            except OSError as error:
                found[number] = _unreachable(endpoint, error.errno, error.strerror or str(error))
                continue
            if fault in (errno.EINPROGRESS, errno.EWOULDBLOCK):
                trying.register(connection, selectors.EVENT_WRITE, number)
            elif fault:
                found[number] = _unreachable(endpoint, fault, os.strerror(fault))
        until = monotonic() + REACH_S
        while trying.get_map() and (left := until - monotonic()) > 0:
            for key, _ in trying.select(left):
                assert isinstance(key.fileobj, socket.socket)
                trying.unregister(key.fileobj)
                if fault := key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    found[key.data] = _unreachable(endpoints[key.data], fault, os.strerror(fault))
                key.fileobj.close()
        for key in trying.get_map().values():
            found[key.data] = _unreachable(endpoints[key.data], errno.ETIMEDOUT, "")
    return list(found.values())


def _unreachable(endpoint: str, fault: int | None, text: str) -> str:
    try:
        here = f"{socket.gethostname()} ({own_address(endpoint)})"
    except OSError:
        here = socket.gethostname()
    what = f"the connection from {here} to {endpoint.removeprefix('tcp://')}"
    if fault == errno.ETIMEDOUT:
        return f"{what} timed out after {REACH_S:g} s: is there a firewall between them?"
    if fault == errno.ECONNREFUSED:
        return f"{what} was refused: nothing listens there, or a firewall rejects it"
    if fault in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EACCES, errno.EPERM):
        return f"{what} failed: {text}: there is no route to it, or a firewall rejects it"
    return f"{what} failed: {text}"


def socket_file(endpoint: str) -> Path | None:
    """The file of an ipc endpoint; None for tcp."""
    return Path(endpoint.removeprefix("ipc://")) if endpoint.startswith("ipc://") else None


def bind_fault(number: int | None) -> str:
    """Why an endpoint cannot be listened on, by the errno of bind, and what to do."""
    if number == errno.EADDRINUSE:
        return "the port is in use; stop what listens there, or name another (port 0: any free one)"
    if number in (errno.EADDRNOTAVAIL, errno.ENODEV):
        return "this machine has no such address"
    return os.strerror(number or 0)


def is_loopback(bind: str) -> bool:
    """True if other machines cannot reach an "address:port"."""
    address = bind.removeprefix("tcp://").rpartition(":")[0]
    ip = ip_of(address)
    return ip.is_loopback if ip else address == "localhost"

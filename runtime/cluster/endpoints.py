"""Where a controller is reached: `ipc://` on one host, `tcp://` between hosts. Pure but for a folder that it makes."""

import errno
import hashlib
import ipaddress
import os
import stat
from pathlib import Path

SOCKET_NAME = "control.sock"
# Where processes listen that no address was given for: out of other machines' reach.
LOOPBACK = "127.0.0.1"
# Bytes of a Unix socket's path (sun_path, less its closing zero).
_LONGEST_PATH = 107


def ipc_endpoint(folder: Path, temporary: Path = Path("/tmp")) -> str:
    """The socket in the run folder, or, where that path is too long for one or no UTF-8, in this user's own folder of
    /tmp."""
    path = folder.absolute() / SOCKET_NAME
    if len(os.fsencode(path)) > _LONGEST_PATH or not str(path).isprintable():
        name = hashlib.sha256(os.fsencode(path)).hexdigest()[:24]
        path = _private_folder(temporary / f"penstock-{os.geteuid()}") / f"{name}.sock"
    return f"ipc://{path}"


def tcp_endpoint(bind: str) -> str:
    """`bind` is "address:port" of one interface; port 0 (or "*") lets the system choose. ValueError otherwise."""
    address, _, port = bind.removeprefix("tcp://").rpartition(":")
    needed = 'needed "address:port", such as "127.0.0.1:0" or "10.0.0.1:5555"'
    port = "0" if port == "*" else port
    if not address or not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise ValueError(f"given {bind!r}, {needed}")
    if address == "*" or ((ip := _ip(address)) and ip.is_unspecified):
        raise ValueError(f"given {bind!r}, every interface of this machine; name the one that the hosts share")
    return f"tcp://{address}:{port}"


def socket_file(endpoint: str) -> Path | None:
    """The file of an ipc endpoint; None for tcp."""
    return Path(endpoint.removeprefix("ipc://")) if endpoint.startswith("ipc://") else None


def bind_fault(number: int | None) -> str:
    """Why an endpoint cannot be listened on, by its errno, and what to do."""
    if number == errno.EADDRINUSE:
        return "the port is in use; stop what listens there, or name another (port 0: any free one)"
    if number in (errno.EADDRNOTAVAIL, errno.ENODEV):
        return "this machine has no such address"
    return os.strerror(number or 0)


def is_loopback(bind: str) -> bool:
    """Is an "address:port" out of other machines' reach?"""
    address = bind.removeprefix("tcp://").rpartition(":")[0]
    ip = _ip(address)
    return ip.is_loopback if ip else address == "localhost"


def _ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """None for a name, or for anything else."""
    try:
        return ipaddress.ip_address(address.strip("[]"))
    except ValueError:
        return None


def _private_folder(folder: Path) -> Path:
    """A folder of mode 0700 that is this user's; another user may have made it first to listen in."""
    folder.mkdir(mode=0o700, exist_ok=True)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
        given = f"owner {facts.st_uid}, mode {stat.filemode(facts.st_mode)}"
        raise PermissionError(f"{folder}: given {given}; needed a folder of user {os.geteuid()} alone (mode 0700)")
    return folder

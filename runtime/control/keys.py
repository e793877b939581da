"""The secrets of one run: a token and CURVE key pairs, made by the launcher, kept in files of mode 0600.

`keys/controller.json` (a `Door`) is what the controller listens with, `keys/<host>.json` (a `Join`) what the agent of
that host and its ranks connect with, to the controller and to the ranks of other hosts. No secret is ever an argument
of a process.
"""

import json
import os
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from penstock.runtime.control.endpoints import LOOPBACK
from penstock.runtime.control.gate import new_pair
from penstock.runtime.control.messages import Hello


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair in Z85."""

    public: str
    secret: str = field(repr=False)

    @staticmethod
    def make() -> "KeyPair":
        return KeyPair(*new_pair())


@dataclass(frozen=True, slots=True)
class _Secrets:
    """A dataclass of strings and of maps of strings that is kept as JSON."""

    def write(self, path: Path) -> None:
        """Made with mode 0600 before the first byte is in it. Raises FileExistsError."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump({"format": 1, **asdict(self)}, file, indent=1)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises ValueError for a file that is not what `write` makes, or that others may read."""
        if path.stat().st_mode & 0o077:
            raise ValueError(f"{path}: others may read this key file; needed mode 0600 (chmod 600 {path})")
        try:
            data: dict[str, Any] = json.loads(path.read_text())
            found = cls(**{name: value for name, value in data.items() if name != "format"})
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: not a key file of Penstock ({error})") from error
        if data.get("format") != 1:
            raise ValueError(f"{path}: given format {data.get('format')!r}, needed 1")
        return found


@dataclass(frozen=True, slots=True)
class Door(_Secrets):
    """What a controller listens with. `allowed` has each host's public key; no keys at all means ipc."""

    run: str
    endpoint: str
    token: str = field(repr=False)
    public: str = ""
    secret: str = field(default="", repr=False)
    allowed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Join(_Secrets):
    """What one host connects with. `folder` is the run folder there; `server` the controller's public key.

    `hosts` has each host's public key: those who may ask this host's ranks for values, and whom they may ask.
    `address` is where these ranks listen for that.
    """

    run: str
    endpoint: str
    token: str = field(repr=False)
    host: str
    folder: str
    server: str = ""
    public: str = ""
    secret: str = field(default="", repr=False)
    address: str = LOOPBACK
    hosts: dict[str, str] = field(default_factory=dict)

    def hello(self, role: Literal["rank", "agent", "heartbeat"], name: str, rank: int = 0) -> Hello:
        """How this process introduces itself."""
        return Hello(role, name, rank, os.getpid(), self.host, self.token)


@dataclass(frozen=True, slots=True)
class Keys:
    """All of a run's secrets, in the launcher's memory until they are written."""

    door: Door
    hosts: dict[str, KeyPair]

    @staticmethod
    def make(run: str, endpoint: str, hosts: Iterable[str]) -> "Keys":
        """A new token, new key pairs for several hosts, and for tcp also for a single one and the controller."""
        token, names = secrets.token_hex(16), list(hosts)
        unix = endpoint.startswith("ipc://")
        if unix and len(names) == 1:
            return Keys(Door(run, endpoint, token), {names[0]: KeyPair("", "")})
        pairs = {name: KeyPair.make() for name in names}
        if unix:
            return Keys(Door(run, endpoint, token), pairs)
        server, allowed = KeyPair.make(), {name: pair.public for name, pair in pairs.items()}
        return Keys(Door(run, endpoint, token, server.public, server.secret, allowed), pairs)

    def join(self, host: str, endpoint: str, folder: Path, address: str = LOOPBACK) -> Join:
        """`endpoint` is where the controller really listens: its port may have been the system's choice."""
        door, pair = self.door, self.hosts[host]
        publics = {name: other.public for name, other in self.hosts.items() if other.public}
        join = Join(door.run, endpoint, door.token, host, str(folder), door.public, pair.public, pair.secret)
        return replace(join, address=address, hosts=publics)

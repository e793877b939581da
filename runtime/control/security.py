"""The secrets of one run: a token and CURVE key pairs, made by the launcher, kept in files of mode 0600.

The controller listens with `keys/controller.json` (a `ServerKeys`). The agent and the ranks of a host connect with
`keys/<host>.json` (a `Join`), to the controller and to the ranks of other hosts. Agents that are not known beforehand
get their `Join` at the launcher's desk, for a `Ticket`. No secret is ever an argument of a process.
"""

import json
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import ClassVar, Self

import msgspec
import zmq

from penstock.runtime.cluster.endpoints import LOOPBACK
from penstock.runtime.control.signals import GRACE_S
from penstock.runtime.record.folder import create_file, make_folder
from penstock.runtime.record.typed_json import parse_json


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair in Z85."""

    public: str
    secret: str = field(repr=False)

    @staticmethod
    def make() -> "KeyPair":
        return KeyPair(*(key.decode() for key in zmq.curve_keypair()))


class KeyFileError(ValueError):
    """A file is no key file, or other users may read it."""


@dataclass(frozen=True, slots=True)
class _Secrets:
    """A dataclass of strings, numbers, lists and maps that is stored as JSON. `needed` describes the file in errors."""

    needed: ClassVar[str]

    def write(self, path: Path) -> None:
        """Write the file, with mode 0600 from the start; it gets its name when complete. Raises FileExistsError."""
        make_folder(path.parent)
        create_file(path, self.text().encode())

    def text(self) -> str:
        """The content of the file."""
        return json.dumps({"format": 1, **asdict(self)}, indent=1)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the file. Raises KeyFileError if `write` did not make it, or if other users may read it."""
        try:
            data = parse_json(path.read_bytes(), "JSON")  # a path in it may not be UTF-8, which msgspec rejects
            found = msgspec.convert(data, cls)
            others = path.stat().st_mode & 0o077
        except OSError as error:
            raise KeyFileError(f"{path}: cannot be read: {error.strerror}; needed {cls.needed}") from error
        except ValueError as error:
            raise KeyFileError(f"{path}: not a key file of Penstock ({error}); needed {cls.needed}") from error
        if unknown := sorted(data.keys() - {"format"} - {known.name for known in fields(cls)}):
            raise KeyFileError(f"{path}: given a key file with {', '.join(unknown)}; needed {cls.needed}")
        if data.get("format") != 1:
            raise KeyFileError(f"{path}: given format {data.get('format')!r}, needed 1")
        if others:
            raise KeyFileError(f"{path}: others may read this key file; needed mode 0600 (chmod 600 {path})")
        return found


@dataclass(frozen=True, slots=True)
class ServerKeys(_Secrets):
    """What a controller listens with. `allowed` has each host's name and public key; on ipc there are no keys."""

    needed: ClassVar[str] = "what the launcher wrote for the controller"

    run: str
    endpoint: str
    token: str = field(repr=False)
    public: str = ""
    secret: str = field(default="", repr=False)
    allowed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Join(_Secrets):
    """What one host connects with. `folder` is the run folder there; `server` the controller's public key.

    `hosts` has each host's public key: hosts whose ranks may ask this host's ranks for values, and the other way round.
    `address` is where this host's ranks listen for that. `modules` are imported once per host, for all its ranks.
    `grace` is the seconds that the host has left after a cluster manager announces to its agent that it takes the host
    away. `again`: a run that fails by the loss of a process resumes by itself, and an agent with a ticket enrols again.
    `life`: how many agents had this host before.
    """

    needed: ClassVar[str] = "the join file that `penstock run --cluster` wrote for this host"

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
    modules: tuple[str, ...] = ()
    grace: float = GRACE_S
    again: bool = False
    life: int = 0


@dataclass(frozen=True, slots=True)
class Ticket(_Secrets):
    """What agents of a job enrol with: where the desk is ("host:port"), the desk's public key, and a token."""

    needed: ClassVar[str] = "the ticket that `penstock run … --on` wrote for agents"

    job: str
    endpoint: str
    server: str
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class DeskKeys(_Secrets):
    """What a desk listens with. Kept in a file, it gives one ticket for all starts of a job."""

    needed: ClassVar[str] = "the desk's keys, as `penstock run … --on kubernetes` makes them"

    job: str
    token: str = field(repr=False)
    public: str
    secret: str = field(repr=False)

    @staticmethod
    def make(job: str) -> "DeskKeys":
        pair = KeyPair.make()
        return DeskKeys(job, secrets.token_hex(16), pair.public, pair.secret)

    def ticket(self, endpoint: str) -> Ticket:
        """`endpoint` is "host:port", as agents reach the desk."""
        return Ticket(self.job, endpoint, self.public, self.token)


@dataclass(frozen=True, slots=True)
class Keys:
    """All of a run's secrets, in the launcher's memory until they are written."""

    server: ServerKeys
    hosts: dict[str, KeyPair]

    @staticmethod
    def make(run: str, endpoint: str, hosts: Iterable[str]) -> "Keys":
        """A new token, and new key pairs: for each host if there are several; on tcp always, and for the controller."""
        names, unix, nothing = list(hosts), endpoint.startswith("ipc://"), KeyPair("", "")
        pairs = {name: nothing if unix and len(names) == 1 else KeyPair.make() for name in names}
        server, allowed = nothing if unix else KeyPair.make(), {name: pair.public for name, pair in pairs.items()}
        token = secrets.token_hex(16)
        return Keys(ServerKeys(run, endpoint, token, server.public, server.secret, {} if unix else allowed), pairs)

    def join(
        self,
        host: str,
        endpoint: str,
        folder: Path,
        address: str = LOOPBACK,
        modules: tuple[str, ...] = (),
        grace: float = GRACE_S,
        again: bool = False,
    ) -> Join:
        """The `Join` of a host. `endpoint` is where the controller listens, with the port that the system chose."""
        server_keys, pair = self.server, self.hosts[host]
        publics = {name: other.public for name, other in self.hosts.items() if other.public}
        join = Join(
            server_keys.run,
            endpoint,
            server_keys.token,
            host,
            str(folder),
            server_keys.public,
            pair.public,
            pair.secret,
        )
        return replace(join, address=address, hosts=publics, modules=modules, grace=grace, again=again)

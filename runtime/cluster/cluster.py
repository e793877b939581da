"""The machines of a run: from a user's TOML file, from a word such as `32x8xH100`, or this machine.

`docs/cluster-file.md` has all keys of the file. `penstock doctor --measure` writes one for this machine, with the
measured rates of its memory and links in [cpus.this]. A word is hosts × GPUs × kind, several kinds joined by `+`; its
hosts have a core for each GPU, and no addresses: it is for plans, not for runs.

A fault of a file is reported with its key, what was given, and what is needed, one line for each (`explain`).
"""

import os
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from penstock.graph.machine import cuda_devices, usable_cores, usable_memory_gib
from penstock.runtime.cluster.endpoints import LOOPBACK, ip_of, ipc_endpoint, is_loopback, tcp_endpoint
from penstock.runtime.cluster.gpus import GPUS, Efficiency, Gpu, HostTime, Tflops, gpu_like, kind_of


def nearest(given: str, known: Iterable[str]) -> str:
    """A hint at the known name that was probably meant, or at all known names."""
    names = sorted(known)
    close = get_close_matches(given, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"


def explain(error: ValidationError, where: str, table: "type[BaseModel] | None" = None) -> str:
    """A pydantic error as lines of `where: key: given …, needed …`. For an unknown key, the nearest known one. Keys at
    the top level are those of `table`, by default a cluster file's."""
    faults = error.errors()
    inside = {str(fault["loc"][0]) for fault in faults if len(fault["loc"]) > 1}
    lines = []
    for fault in faults:
        path = ".".join(str(part) for part in fault["loc"])
        if fault["type"] == "extra_forbidden":
            # The innermost part of the path that is a table; other parts are numbers, or names that the user chose.
            inner = next((TABLES[part] for part in fault["loc"][-2::-1] if part in TABLES), table or Cluster)
            lines.append(f"{where}: unknown key {path!r}; {nearest(str(fault['loc'][-1]), inner.model_fields)}")
        elif fault["type"] == "missing":
            table_of = ".".join(str(part) for part in fault["loc"][:-1])
            given = f"given {', '.join(fault['input']) or 'no key'}, needed {fault['loc'][-1]}, too"
            lines.append(": ".join(filter(None, (where, table_of, given))))
        elif fault["type"] == "value_error":
            lines.append(": ".join(filter(None, (where, path, str(fault["ctx"]["error"])))))
        elif path not in inside:  # do not also call a list too short because of its faulty items
            form = next((FORMS[part] for part in fault["loc"][::-1] if part in FORMS), "")
            needed = NEEDED.get(fault["type"], "")
            needed = needed.format(form=form, **fault.get("ctx", {})) if needed else fault["msg"]
            lines.append(f"{where}: {path}: given {fault['input']!r:.60}, needed {needed}")
    return "\n".join(lines)


def _twice(names: Iterable[str]) -> str:
    """The names that occur more than once, for messages."""
    return ", ".join(sorted(name for name, count in Counter(names).items() if count > 1))


def _name(given: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", given):
        raise ValueError(f"given {given!r}, needed letters, digits, '_', '.' or '-', 64 at most")
    return given


def _device(given: str) -> str:
    if not re.fullmatch(r"cpu|cuda:\d+", given):
        raise ValueError(f"given {given!r}, needed 'cpu' or 'cuda:<number>'")
    return given


def _address(given: str) -> str:
    if ":" in given and not given.endswith("]"):
        raise ValueError(f"given {given!r}, needed an address without a port: each rank has one of the system's choice")
    if given:
        tcp_endpoint(f"{given}:0")  # raises unless it is an address of one interface
        if ip_of(given) is None and not re.fullmatch(r"(?!-)[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?", given):
            needed = "needed a host name or an IP address, such as 10.0.0.2 or [fd00::2]"
            raise ValueError(f"given {given!r}, {needed}")
    return given


def _hosts(given: object) -> object:
    names = given if isinstance(given, list | tuple) else [given]
    if not names or not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise ValueError(f"given {given!r}, needed the name of a host, or of several that differ")
    return given


def _python(given: str) -> str:
    if given and not os.path.isabs(given):
        raise ValueError(f"given {given!r}, needed the whole path of an interpreter, such as /opt/vllm/bin/python")
    return given


def _pool(given: object) -> object:
    """A pool as users write it: a host, several hosts, or a table."""
    if isinstance(given, PoolTable):
        return given
    if not isinstance(given, dict):
        return _hosts(given)
    try:
        return PoolTable.model_validate(given)
    except ValidationError as error:
        raise ValueError(explain(error, "its table", PoolTable)) from None


class ClusterError(ValueError):
    """A cluster file that cannot be used: the user's fault. The text has a line for each fault."""


class SeenGpu(NamedTuple):
    """A GPU of this machine as torch sees it, with the numbers of its compute capability."""

    name: str
    memory_gib: float
    major: int
    minor: int = 0


class Cpu(BaseModel):
    """Measurements of a host. GB are 10^9 bytes. `read`, `copy` and `cached` are rates of its memory, the last for a
    tensor that fits in the nearest caches. `shared` and `gloo` are rates between two processes, `latency_us` is the
    time of a message between them, and `call_us` that of one operation on a tiny tensor."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    memory_gib: float = Field(gt=0)
    read_gb_s: float = Field(gt=0)
    copy_gb_s: float = Field(gt=0)
    cached_gb_s: float = Field(gt=0)
    shared_gb_s: float = Field(gt=0)
    gloo_gb_s: float = Field(gt=0)
    latency_us: float = Field(ge=0)
    call_us: float = Field(ge=0)


class Host(BaseModel):
    """One machine. `cores` are for ranks, and of the kind `cpu`; `devices` are named as in torch, and CUDA devices are
    of the kind `gpu`. `memory_gib` is the host's own memory. An "external" agent is not started by the launcher.

    At `address`, a host name or an IP address, its ranks listen for ranks of other hosts, which read values or exchange
    weights.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, AfterValidator(_name)]
    cores: int = Field(ge=1)
    devices: tuple[Annotated[str, AfterValidator(_device)], ...] = ()
    gpu: str = ""
    cpu: str = ""
    memory_gib: float | None = Field(default=None, gt=0)
    agent: Literal["local", "external"] = "local"
    address: Annotated[str, AfterValidator(_address)] = ""

    @field_validator("devices")
    @classmethod
    def _check_devices(cls, devices: tuple[str, ...]) -> tuple[str, ...]:
        if twice := _twice(name for name in devices if name != "cpu"):
            raise ValueError(f"{twice} is there twice; each CUDA device once is needed")
        return devices

    @property
    def accelerators(self) -> tuple[str, ...]:
        return tuple(d for d in self.devices if d != "cpu")


class PoolTable(BaseModel):
    """A pool as a table. `python` is the interpreter of its ranks, on each of its hosts; "" is the command's own."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hosts: Annotated[str | tuple[str, ...], BeforeValidator(lambda given: _hosts(given) if given else ())] = ()
    python: Annotated[str, AfterValidator(_python)] = ""


class Cluster(BaseModel):
    """`hosts`; `bind`, where the controller listens; for `pools`, the host of each, or the hosts of its replicas in
    turn; further kinds of GPUs (`gpus`), beside those of `cluster.gpus`; and kinds of CPUs (`cpus`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hosts: tuple[Host, ...] = Field(min_length=1)
    bind: str = ""
    pools: dict[str, Annotated[PoolTable | str | tuple[str, ...], BeforeValidator(_pool)]] = Field(default_factory=dict)
    gpus: dict[str, Gpu] = Field(default_factory=dict)
    cpus: dict[str, Cpu] = Field(default_factory=dict)

    @field_validator("gpus", mode="before")
    @classmethod
    def _fill_gpus(cls, gpus: Any) -> Any:
        return {name: _filled(name, own) for name, own in gpus.items()} if isinstance(gpus, dict) else gpus

    @field_validator("bind")
    @classmethod
    def _check_bind(cls, bind: str) -> str:
        if bind:
            tcp_endpoint(bind)  # raises unless it is an address of one interface
        return bind

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        names = [host.name for host in self.hosts]
        if twice := _twice(names):
            raise ValueError(f"hosts: {twice} is there twice; names must differ")
        for pool in self.pools:
            for host in self._names_of(pool):
                if host not in names:
                    raise ValueError(f"pools.{pool}: given host {host!r}; {nearest(host, names)}")
        for own in self.hosts:
            for what, kind, known in (("gpu", own.gpu, {**GPUS, **self.gpus}), ("cpu", own.cpu, self.cpus)):
                if kind and kind not in known:
                    raise ValueError(f"hosts: {own.name}: given {what} {kind!r}; {nearest(kind, known)}")
        self._check_reach()
        return self

    def _check_reach(self) -> None:
        """Raise ValueError if hosts on different machines could not reach each other."""
        # Only IP addresses are compared: names are resolved where they are used.
        if len({ip.version for host in self.hosts if (ip := ip_of(host.address))}) > 1:
            raise ValueError("hosts: given an `address` of IPv4 and one of IPv6, needed one kind: they meet by gloo")
        lacking = [host.name for host in self.hosts if is_loopback(f"{host.address or LOOPBACK}:0")]
        if lacking and len(self.hosts) > 1 and self.bind and not is_loopback(self.bind):
            given = f"bind is {self.bind}, and hosts {', '.join(lacking)} have no `address` but of loopback"
            raise ValueError(f"hosts: {given}; needed where each can be reached by the others, to read its values")
        outside = [host.name for host in self.hosts if host.agent == "external" and host.name not in lacking]
        if outside and not self.bind:
            needed = 'where the controller listens for it, such as bind = "10.0.0.1:5555"'
            raise ValueError(
                f"bind: given none, and the agent of {', '.join(outside)} is on another machine; needed {needed}"
            )

    @staticmethod
    def local(num_gpus: int | None = None) -> "Cluster":
        """This machine: the cores that this process may use, and its CUDA devices; `num_gpus` if torch has counted
        them."""
        devices = cuda_devices() if num_gpus is None else tuple(f"cuda:{index}" for index in range(num_gpus))
        return Cluster(hosts=(Host(name="local", cores=usable_cores(), devices=devices),))

    @staticmethod
    def read(path: Path) -> "Cluster":
        """Read a file; without hosts it describes this machine. Raises ClusterError with the path and all faults."""
        try:
            said = tomllib.loads(path.read_text())
            here = {} if "hosts" in said else {"hosts": [host.model_dump() for host in Cluster.local().hosts]}
            return Cluster.model_validate({**said, **here})
        except FileNotFoundError:
            words = "; words such as 8xH100 are for `plan` and `simulate`" if _is_word(str(path)) else ""
            raise ClusterError(f"{path}: given no file there, needed a TOML file of a cluster{words}") from None
        except OSError as error:
            raise ClusterError(f"{path}: cannot be read: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ClusterError(f"{path}: not TOML: {error}") from error
        except ValidationError as error:
            raise ClusterError(explain(error, str(path))) from error

    def with_seen(self, seen: Sequence[SeenGpu]) -> "Cluster":
        """The cluster with this machine's memory, and the kind of the GPUs that torch sees on it, filled in for its
        hosts that do not say theirs. Of several kinds, that of the GPU with the least memory counts."""
        if not seen:
            return self
        memory = usable_memory_gib()
        least = min(seen, key=lambda gpu: gpu.memory_gib)
        kind = kind_of(least.name, least.memory_gib)
        here = [host for host in self.hosts if host.accelerators and host.agent == "local"]
        hosts = tuple(
            host.model_copy(update={"gpu": host.gpu or kind, "memory_gib": self.memory_gib(host) or memory})
            if host in here
            else host
            for host in self.hosts
        )
        gpu = gpu_like(least.name, least.memory_gib, (least.major, least.minor))
        own = {} if kind in GPUS or all(host.gpu for host in here) else {kind: gpu}
        return self.model_copy(update={"hosts": hosts, "gpus": {**own, **self.gpus}})

    def memory_gib(self, host: Host) -> float | None:
        """A host's own memory; None if the file does not say it."""
        return host.memory_gib or (self.cpus[host.cpu].memory_gib if host.cpu else None)

    def host(self, name: str) -> Host:
        return next(h for h in self.hosts if h.name == name)

    def hosts_of(self, pool: str) -> tuple[Host, ...]:
        """The hosts of a pool, for its replicas in turn: those in `pools`, or else the first host."""
        hosts = {host.name: host for host in self.hosts}
        return tuple(hosts[name] for name in self._names_of(pool)) or self.hosts[:1]

    def _names_of(self, pool: str) -> tuple[str, ...]:
        said = self.pools.get(pool, ())
        hosts = said.hosts if isinstance(said, PoolTable) else said
        return (hosts,) if isinstance(hosts, str) else hosts

    def python_of(self, pool: str) -> str:
        """The interpreter of a pool's ranks; "" for the command's own."""
        said = self.pools.get(pool)
        return said.python if isinstance(said, PoolTable) else ""

    def gpu_of(self, host: Host) -> Gpu | None:
        """The kind of a host's GPUs; None for a host without GPUs. Raises ClusterError if the kind is not given."""
        if not host.accelerators:
            return None
        if not host.gpu:
            known = ", ".join({**GPUS, **self.gpus})
            needed = f"the kind of its GPUs, gpu = … (known: {known})"
            raise ClusterError(f"hosts: {host.name}: given {len(host.accelerators)} CUDA devices, needed {needed}")
        return {**GPUS, **self.gpus}[host.gpu]

    def endpoint(self, folder: Path) -> str:
        """Where the controller of a run in `folder` listens: on tcp if there is a bind address or an external agent
        (on loopback unless `bind` has an address), otherwise on a Unix socket.
        """
        if self.bind or any(host.agent == "external" for host in self.hosts):
            # An agent on another machine cannot open a Unix socket.
            return tcp_endpoint(self.bind or "127.0.0.1:0")
        return ipc_endpoint(folder)


# The error code for ranks that could not reach each other.
NO_NETWORK = "no-network"


def check_common_network(hosts: Sequence[Host], where: str) -> None:
    """Raise ClusterError if ranks of `hosts` could not form a process group: each must reach the others."""
    inside = {host.name: is_loopback(f"{host.address or LOOPBACK}:0") for host in hosts}
    # If all are on loopback, they are several hosts on one machine.
    if len(set(inside.values())) > 1:
        given = ", ".join(f"{host.name} ({host.address or 'no address'})" for host in hosts)
        lacking = ", ".join(name for name, alone in inside.items() if alone)
        needed = f"an `address` of {lacking} in [[hosts]] at which the others reach it: they have no network in common"
        raise ClusterError(f"{where} [{NO_NETWORK}]: given a replica over the hosts {given}, needed {needed}")


# The tables inside a cluster file, by their keys.
TABLES: dict[object, type[BaseModel]] = {
    "hosts": Host,
    "gpus": Gpu,
    "cpus": Cpu,
    "tflops": Tflops,
    "efficiency": Efficiency,
    "engine": HostTime,
}


# The lists and tables of a cluster file, by their keys, as they are written in TOML.
FORMS: dict[object, str] = {
    "hosts": "[[hosts]] for each host",
    "devices": '["cuda:0"]',
    "pools": "[pools]",
    "gpus": "[gpus.NAME]",
    "cpus": "[cpus.NAME]",
    "tflops": "{ bf16 = 800 }",
    "efficiency": "{ matmul = 0.6 }",
    "engine": "{ step_ms = 0.5 }",
}

WHOLE = ("int_type", "int_parsing", "int_parsing_size", "int_from_float", "finite_number")
# What a value needs to be, in words of TOML, by pydantic's type of the error. {form} is the value's in `FORMS`; the
# other names are those of the error's context.
NEEDED = {
    "tuple_type": "a list: {form}",
    "too_short": "at least {min_length}: {form}",
    "dict_type": "a table: {form}",
    "model_type": "a table: {form}",
    "string_type": "a text in quotes",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "literal_error": "{expected}",
    **dict.fromkeys(WHOLE, "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    "greater_than": "a number above {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than_equal": "at most {le:g}",
}


def _filled(name: str, own: Any) -> Any:
    """A kind's own figures, completed by those of the kind that it is `like`."""
    if not isinstance(own, dict) or "like" not in own:
        return own
    like = own["like"]
    if not isinstance(like, str) or like not in GPUS:
        raise ValueError(f"{name}.like: given {like!r:.60}; {nearest(str(like), GPUS)}")
    base = GPUS[like].model_dump()
    nested = {
        key: {**base[key], **own[key]} for key in ("tflops", "efficiency", "engine") if isinstance(own.get(key), dict)
    }
    return {**base, **{key: value for key, value in own.items() if key != "like"}, **nested}


_PART = re.compile(r"(?:(\d+)x)?(\d+)x([A-Za-z]\w*)")


# The word for this machine, once it is measured.
THIS = "this"

# Most GPUs in one part of a word: more than any site has. It catches a word with a digit too many.
MOST_GPUS = 100_000


def read_cluster(given: str, this: Path | None = None) -> Cluster:
    """The cluster that `--cluster` names; "this" is the one in the file `this`. Raises ClusterError for an invalid word
    or file, with what is needed.

    >>> len(read_cluster("2x8xH100+4xB200").hosts)
    3
    """
    if given == THIS and this is not None:
        if not this.exists():
            raise ClusterError(f"--cluster {given}: {this} is not there; needed first: penstock doctor --measure")
        return Cluster.read(this)
    if not _is_word(given) or Path(given).exists():
        return Cluster.read(Path(given))
    hosts: list[Host] = []
    for part in given.split("+"):
        hosts += _hosts_of_spec(given, part, len(hosts))
    return Cluster(hosts=tuple(hosts))


def _is_word(given: str) -> bool:
    """A path has a suffix or a folder; any other word is meant as hosts × GPUs × kind."""
    return not (Path(given).suffix or "/" in given)


def _hosts_of_spec(given: str, part: str, first: int) -> list[Host]:
    match = _PART.fullmatch(part)
    if match is None:
        needed = "hosts x GPUs x kind such as 32x8xH100, GPUs x kind of one host such as 8xH100"
        needed += f", several joined by '+', a TOML file, or {THIS!r}"
        raise ClusterError(f"--cluster {given}: given {part or given!r}, needed {needed}")
    count, gpus, kind = int(match[1] or 1), int(match[2]), match[3]
    if not (count and gpus):
        raise ClusterError(f"--cluster {given}: given {part!r}, needed at least 1 host, and at least 1 GPU in it")
    if count * gpus > MOST_GPUS:
        raise ClusterError(f"--cluster {given}: given {count * gpus} GPUs in {part}, needed at most {MOST_GPUS}")
    if kind not in GPUS:
        raise ClusterError(f"--cluster {given}: given GPUs of kind {kind!r}; {nearest(kind, GPUS)}")
    devices = tuple(f"cuda:{index}" for index in range(gpus))
    return [Host(name=f"host{first + k}", cores=gpus, devices=devices, gpu=kind) for k in range(count)]

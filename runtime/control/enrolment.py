"""How an agent that is not known beforehand joins a run: its messages to the launcher's desk, and the answers.

An agent connects to the desk of its `Ticket` with a fresh key pair, and sends Enrol: the token, what its host has, and
its versions. On Welcome it looks for the run folder, and sends Found. Once all agents have come, Probe asks it to
connect to the others; it answers Reached. While it waits it sends Present, which the desk echoes. It ends in one of two
ways: Refused says why it gets no slot; Admitted brings the `Join` of its slot, and the agent answers Joined, which says
whether it reaches the controller. A frame is MessagePack of [ENROLMENT, Penstock's version, message], so that an agent
and a desk of different versions can name both.
"""

import csv
import os
import platform
import re
import socket
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from time import time
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from penstock import __version__
from penstock.graph.machine import cuda_devices, usable_cores, usable_memory_gib
from penstock.runtime.control.messages import Codec, MessageError
from penstock.runtime.packable import Packable

ENROLMENT: Literal[1] = 1
# Seconds by which the clocks of two hosts may differ: times in shared files and logs are compared.
MAX_CLOCK_S = 30.0

Name = Annotated[str, Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=4096)]
Gib = Annotated[float, Meta(ge=0, le=1e9)]


class Enrol(Packable, frozen=True):
    """An agent asks for a slot. `address` is where its ranks listen. `gpus` counts devices, all of the kind `gpu`; the
    smallest has `gpu_gib`. `clock` is in seconds since 1970. `order` is the agent's number among those that a cluster
    manager has started, −1 for none. Others may test at `port` of its address whether they reach it.
    """

    token: Name
    hostname: Name
    address: Name
    cores: Annotated[int, Meta(ge=1, le=1 << 16)]
    memory_gib: Gib
    gpus: Annotated[int, Meta(ge=0, le=1024)]
    gpu: Name
    gpu_gib: Gib
    pid: Annotated[int, Meta(ge=0, le=1 << 32)]
    torch: Name
    python: Name
    clock: Annotated[float, Meta(ge=0, le=1e12)]
    order: Annotated[int, Meta(ge=-1, le=1 << 20)] = -1
    port: Annotated[int, Meta(ge=0, le=65535)] = 0

    def __repr__(self) -> str:
        """All but the token."""
        return f"Enrol({self.hostname!r}, {self.address!r}, cores={self.cores}, gpus={self.gpus}, pid={self.pid})"


class Welcome(Packable, frozen=True):
    """The launcher's path of the run folder, and the name and content of a file in it, by which an agent recognises
    the same folder."""

    folder: Text
    file: Name
    content: Name


class Found(Packable, frozen=True):
    """The agent's run folder: the launcher's (`shared`), or its own. `lack` says why it has none."""

    shared: bool
    folder: Text = ""
    lack: Text = ""


class Probe(Packable, frozen=True):
    """Try to connect to these tcp endpoints of other agents."""

    endpoints: tuple[Name, ...]


class Reached(Packable, frozen=True):
    """The answer to Probe: which connections failed, "" for none."""

    lack: Text = ""


class Joined(Packable, frozen=True):
    """The agent has its `Join`, and reaches the controller, or `lack` says why not."""

    lack: Text = ""


class Present(Packable, frozen=True):
    """Still here."""


class Withdrawn(Packable, frozen=True):
    """The agent ends before the run has begun."""

    reason: Text


class Admitted(Packable, frozen=True):
    """The agent's slot, and the `Join` of it as JSON."""

    slot: Name
    join: str

    def __repr__(self) -> str:
        """All but the keys."""
        return f"Admitted({self.slot!r})"


class Refused(Packable, frozen=True):
    """Why the agent gets no slot. `over`: the run has ended well. `again`: it is about to resume by itself, with a new
    desk."""

    reason: Text
    over: bool = False
    again: bool = False


FromAgent = Enrol | Found | Reached | Joined | Present | Withdrawn
FromDesk = Welcome | Probe | Present | Admitted | Refused

_TO_DESK: Codec[tuple[int, str, FromAgent]] = Codec(tuple[Literal[1], str, FromAgent], "enrolment")
_TO_AGENT: Codec[tuple[int, str, FromDesk]] = Codec(tuple[Literal[1], str, FromDesk], "answer of the desk")
_FRAME = msgspec.msgpack.Decoder(tuple[Literal[1], Name, msgspec.Raw])


def pack_for_desk(message: FromAgent) -> bytes:
    return _TO_DESK.pack((ENROLMENT, __version__, message))


def pack_for_agent(message: FromDesk) -> bytes:
    return _TO_AGENT.pack((ENROLMENT, __version__, message))


def read_at_desk(data: bytes) -> FromAgent:
    """Raises MessageError for a malformed frame, VersionError for a frame of another version of Penstock."""
    _require_version(data)
    return _TO_DESK.unpack(data)[2]


def read_at_agent(data: bytes) -> FromDesk:
    """Raises as `read_at_desk`."""
    _require_version(data)
    return _TO_AGENT.unpack(data)[2]


class VersionError(MessageError):
    """A message of another version of Penstock, which is `args[0]`."""


def _require_version(data: bytes) -> None:
    try:
        given = _FRAME.decode(data)[1]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MessageError(f"enrolment: {error!s:.160}") from error
    if given != __version__:
        raise VersionError(given)


# What an agent says of its host ---------------------------------------------------------------------------

# Environment variables with the name and the number of an agent, for managers that set neither.
HOSTNAME, ORDER = "PENSTOCK_HOSTNAME", "PENSTOCK_ORDER"
# Environment variables with the number of a task: ours, Slurm's, torchelastic's, that of an indexed Job of Kubernetes.
ORDERS = (ORDER, "SLURM_PROCID", "GROUP_RANK", "JOB_COMPLETION_INDEX")


class Versions(NamedTuple):
    """Versions that must be the same in all processes of a run."""

    torch: str
    python: str

    @staticmethod
    def here() -> "Versions":
        """The versions of this process, without importing torch. CPU and GPU builds of torch count as equal."""
        try:
            torch = version("torch").partition("+")[0]
        except PackageNotFoundError:
            torch = "none"
        return Versions(torch, ".".join(platform.python_version_tuple()[:2]))


def facts(token: str, address: str, port: int = 0, environment: Mapping[str, str] = os.environ) -> Enrol:
    """What this host has. Its ranks will listen at `address`; a probe socket listens at `port` now."""
    versions, (gpu, gpu_gib) = Versions.here(), _gpu()
    # torchrun on a single host (--standalone) gives every agent the number 0.
    alone = environment.get("GROUP_WORLD_SIZE") == "1"
    given = [environment.get(name, "") for name in ORDERS if not (alone and name == "GROUP_RANK")]
    order = next((int(number) for number in given if number.isdecimal()), -1)
    return Enrol(
        token=token,
        hostname=environment.get(HOSTNAME) or environment.get("SLURMD_NODENAME") or socket.gethostname(),
        address=address,
        cores=usable_cores(),
        memory_gib=usable_memory_gib(),
        gpus=len(cuda_devices()),
        gpu=gpu,
        gpu_gib=gpu_gib,
        pid=os.getpid(),
        torch=versions.torch,
        python=versions.python,
        clock=time(),
        order=order,
        port=port,
    )


def _gpu() -> tuple[str, float]:
    """The driver's name and the memory in GiB of this host's smallest GPU; "" and 0 for none."""
    if not cuda_devices():
        return "", 0.0
    command = ["nvidia-smi", "--query-gpu=memory.total,name", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return "", 0.0
    rows = [(float(row[0]) / 1024, row[1].strip()) for row in csv.reader(listed.splitlines()) if len(row) == 2]
    memory, name = min(rows, default=(0.0, ""))
    return name, memory


def plain_name(hostname: str) -> str:
    """A host's name as the name of a slot, which is part of file names."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", hostname)[:56].strip("-.") or "host"


def mismatch(enrol: Enrol, now: float) -> str:
    """Which of an agent's versions and clock do not match this process's; "" for none."""
    here, faults = Versions.here(), []
    for what, given, needed in (("torch", enrol.torch, here.torch), ("Python", enrol.python, here.python)):
        if given != needed:
            faults.append(f"given {what} {given}, needed {needed}, as the launcher has")
    if abs(off := enrol.clock - now) > MAX_CLOCK_S:
        given = f"a clock that is {abs(off):.0f} s {'ahead of' if off > 0 else 'behind'} the launcher's"
        faults.append(f"given {given}, needed clocks within {MAX_CLOCK_S:.0f} s (is NTP running?)")
    return "; ".join(faults)


def require_one_per_host() -> str:
    """What is wrong with how torchrun started this process; "" for nothing."""
    each = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if each == "1":
        return ""
    return f"given {each} agents on this host by torchrun, needed --nproc-per-node 1: an agent starts all ranks of it"


def require_gpus(environment: Mapping[str, str] = os.environ) -> str:
    """What is wrong with the GPUs that Slurm gave to this process; "" for nothing, or if it gave none. Without this
    check, a run meant for GPUs would use CPUs. Numbers are not compared: Slurm counts a part of a card as one."""
    given = environment.get("SLURM_GPUS_ON_NODE", "")
    if not given.isdecimal() or int(given) == 0 or cuda_devices():
        return ""
    needed = "needed a driver that works here (nvidia-smi -L), or a job without GPUs"
    return f"given {given} GPUs by Slurm (SLURM_GPUS_ON_NODE), found none of NVIDIA that can be used; {needed}"

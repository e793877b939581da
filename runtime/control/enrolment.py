"""How an agent that nobody has named beforehand joins a run: what it says at the launcher's desk, and what it hears.

An agent connects to the desk of its `Ticket` with a key pair that it has just made, and says Enrol: the token, what its
host has, and its versions. It hears Welcome, looks for the run folder, and says Found. Once all have come, Probe has it
try to connect to the others, and Reached says what came of that. While it waits it says Present, which the desk
repeats. It ends in one of two ways: Refused says why it gets no slot; Admitted brings the `Join` of its slot, and
Joined says whether it reaches the controller. A frame is MessagePack of [ENROLMENT, Penstock's version, message], so
that agents and a desk of different versions name both.
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
from penstock.runtime.cluster.machine import cuda_devices, usable_cores, usable_memory_gib
from penstock.runtime.control.messages import Codec, MessageError
from penstock.runtime.packable import Packable

ENROLMENT: Literal[1] = 1
# Seconds by which the clocks of two hosts may differ: files of a shared folder and logs are compared by them.
MAX_CLOCK_S = 30.0

Name = Annotated[str, Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=4096)]
Gib = Annotated[float, Meta(ge=0, le=1e9)]


class Enrol(Packable, frozen=True):
    """An agent asks for a slot. `address` is where its ranks listen; `gpus` counts devices, all of the kind `gpu`, of
    which the smallest has `gpu_gib`. `clock` are seconds since 1970; `order` is the agent's number among those that a
    cluster manager has started, −1 for none. At `port` of its address others may try whether they reach it.
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
    """The run folder as the launcher has it, and a file in it with what it holds: by that a folder is known to be the
    same one."""

    folder: Text
    file: Name
    content: Name


class Found(Packable, frozen=True):
    """The folder that the agent takes: the launcher's own, or one of its own. `lack` says why it has none."""

    shared: bool
    folder: Text = ""
    lack: Text = ""


class Probe(Packable, frozen=True):
    """Try to connect to these tcp endpoints of other agents."""

    endpoints: tuple[Name, ...]


class Reached(Packable, frozen=True):
    """What has come of it: which connections could not be made, "" if all could."""

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
    """Why the agent gets no slot. `over`: the run has ended well, and needs nobody any more. `again`: it is about to
    go on by itself, with a new desk."""

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
    """Raises MessageError for what is no message, VersionError for that of another Penstock."""
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

# Environment variables with the name and the number of an agent, for managers whose nodes say neither.
HOSTNAME, ORDER = "PENSTOCK_HOSTNAME", "PENSTOCK_ORDER"
# Where cluster managers say which of its tasks a process is: Slurm, torchelastic, an indexed Job of Kubernetes.
ORDERS = (ORDER, "SLURM_PROCID", "GROUP_RANK", "JOB_COMPLETION_INDEX")


class Versions(NamedTuple):
    """What has to be the same in all processes of a run."""

    torch: str
    python: str

    @staticmethod
    def here() -> "Versions":
        """Without importing torch. That of a CPU and of a GPU build are one."""
        try:
            torch = version("torch").partition("+")[0]
        except PackageNotFoundError:
            torch = "none"
        return Versions(torch, ".".join(platform.python_version_tuple()[:2]))


def facts(token: str, address: str, port: int = 0, environment: Mapping[str, str] = os.environ) -> Enrol:
    """What this host has, for a run whose ranks listen at `address` here, where something listens at `port` now."""
    versions, (gpu, gpu_gib) = Versions.here(), _gpu()
    # A torchrun of one host alone (--standalone) has nothing to number.
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
    """The driver's name of this host's GPUs, and the memory of the smallest one in GiB; "" and 0 for none."""
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
    """A host's name as that of a slot, which is part of files' names."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", hostname)[:56].strip("-.") or "host"


def mismatch(enrol: Enrol, now: float) -> str:
    """What of an agent's versions and clock does not suit this process's; "" for nothing."""
    here, faults = Versions.here(), []
    for what, given, needed in (("torch", enrol.torch, here.torch), ("Python", enrol.python, here.python)):
        if given != needed:
            faults.append(f"given {what} {given}, needed {needed}, as the launcher has")
    if abs(off := enrol.clock - now) > MAX_CLOCK_S:
        given = f"a clock that is {abs(off):.0f} s {'ahead of' if off > 0 else 'behind'} the launcher's"
        faults.append(f"given {given}, needed clocks within {MAX_CLOCK_S:.0f} s (is NTP running?)")
    return "; ".join(faults)


def require_one_per_host() -> str:
    """What is wrong with how torchrun has started this process; "" for nothing."""
    each = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if each == "1":
        return ""
    return f"given {each} agents on this host by torchrun, needed --nproc-per-node 1: an agent starts all ranks of it"


def require_gpus(environment: Mapping[str, str] = os.environ) -> str:
    """What is wrong with the GPUs that Slurm has given to this process; "" for nothing, or if it has given none. Else a
    run that was meant for them would be done on CPUs. How many are found is not compared: a part of a card is one."""
    given = environment.get("SLURM_GPUS_ON_NODE", "")
    if not given.isdecimal() or int(given) == 0 or cuda_devices():
        return ""
    needed = "needed a driver that works here (nvidia-smi -L), or a job without GPUs"
    return f"given {given} GPUs by Slurm (SLURM_GPUS_ON_NODE), found none of NVIDIA that can be used; {needed}"

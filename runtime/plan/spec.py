"""A cluster in a word, `32x8xH100`: hosts × GPUs × kind; several kinds joined by `+`; or a file; or this machine. Pure
but for the file.

The hosts that such a word makes have a core for each GPU, and no addresses: it is for plans, not for runs.
"""

import re
from pathlib import Path

from penstock.runtime.plan.cluster import Cluster, ClusterError, Host
from penstock.runtime.plan.gpus import GPUS
from penstock.runtime.plan.names import nearest

_PART = re.compile(r"(\d+)x(\d+)x([A-Za-z]\w*)")


THIS = "this"
"""The machine that was measured here."""

MOST_GPUS = 100_000
"""Of one kind: more than there are in one place, and more than a word with a digit too many should make."""


def read_cluster(given: str, this: Path | None = None) -> Cluster:
    """The cluster that `--cluster` names; "this" is that in the file `this`. Raises ClusterError for a word or a file
    that is none, with what is needed.

    >>> len(read_cluster("2x8xH100+1x4xB200").hosts)
    3
    """
    if given == THIS and this is not None:
        if not this.exists():
            raise ClusterError(f"--cluster {given}: {this} is not there; needed first: penstock doctor --measure")
        return Cluster.read(this)
    # A path has a suffix or a folder; a word with an x in it that is neither was meant to be hosts × GPUs × kind.
    if Path(given).suffix or "/" in given or Path(given).exists():
        return Cluster.read(Path(given))
    hosts: list[Host] = []
    for part in given.split("+"):
        hosts += _hosts(given, part, len(hosts))
    return Cluster(hosts=tuple(hosts))


def _hosts(given: str, part: str, first: int) -> list[Host]:
    match = _PART.fullmatch(part)
    if match is None:
        needed = f"hosts x GPUs x kind such as 32x8xH100, several joined by '+', a TOML file, or {THIS!r}"
        raise ClusterError(f"--cluster {given}: given {part!r}, needed {needed}")
    count, gpus, kind = int(match[1]), int(match[2]), match[3]
    if not (count and gpus):
        raise ClusterError(f"--cluster {given}: given {count} hosts of {gpus} GPUs, needed at least 1 of each")
    if count * gpus > MOST_GPUS:
        raise ClusterError(f"--cluster {given}: given {count * gpus} GPUs in {part}, needed at most {MOST_GPUS}")
    if kind not in GPUS:
        raise ClusterError(f"--cluster {given}: given GPUs of kind {kind!r}; {nearest(kind, GPUS)}")
    devices = tuple(f"cuda:{index}" for index in range(gpus))
    return [Host(name=f"host{first + k}", cores=gpus, devices=devices, gpu=kind) for k in range(count)]

"""Meshes as users write them: `trainer=fsdp2xtp2`, axes with their sizes, outermost first. Pure."""

import re
from collections.abc import Mapping, Sequence

from penstock.graph.sharding import DATA, FSDP, STAGE, TENSOR, Axes, num_ranks
from penstock.runtime.plan.cluster import ClusterError

RANKS_PER_CORE = 16
"""Ranks of one replica for each core of its host: more would not even start in time."""

AXES = {
    STAGE: "pipeline stages",
    DATA: "copies of the model",
    FSDP: "shards of each tensor",
    TENSOR: "shares of each layer",
}


def read_meshes(words: Sequence[str]) -> dict[str, Axes]:
    """The mesh of each pool that is named. Raises ClusterError for a word that is none, with what is needed."""
    found: dict[str, Axes] = {}
    for word in words:
        pool, equals, text = word.partition("=")
        if not (pool and equals):
            raise ClusterError(f"--mesh: given {word!r}, needed POOL=MESH, such as trainer=fsdp2xtp2")
        if pool in found:
            raise ClusterError(f"--mesh: given {pool} twice, needed one mesh for a pool")
        found[pool] = _axes(word, text)
    return found


def _axes(word: str, text: str) -> Axes:
    if text == "1":
        return ()
    axes: list[tuple[str, int]] = []
    for part in text.split("x"):
        match = re.fullmatch(r"([a-z]+)(\d+)", part)
        if match is None or match[1] not in AXES or int(match[2]) < 1:
            known = ", ".join(f"{name} ({what})" for name, what in AXES.items())
            needed = f"axes with their sizes joined by 'x', such as fsdp2xtp2, or 1; axes: {known}"
            raise ClusterError(f"--mesh {word}: given {part!r}, needed {needed}")
        axes.append((match[1], int(match[2])))
    if len(dict(axes)) < len(axes):
        raise ClusterError(f"--mesh {word}: given an axis twice, needed each once")
    return tuple(axes)


def spelled(axes: Axes) -> str:
    """As `read_meshes` reads it; "1" for one rank."""
    return "x".join(f"{name}{size}" for name, size in axes) or "1"


def check_ranks(meshes: Mapping[str, Axes], cores: Mapping[str, int]) -> None:
    """Raises ClusterError for a mesh of more ranks than the `cores` of its pool's host could run: a slip of the pen."""
    for pool, axes in meshes.items():
        count, most = num_ranks(axes), RANKS_PER_CORE * cores.get(pool, 1)
        if count > most:
            given = f"--mesh {pool}={spelled(axes)}: given {count} ranks on a host of {cores.get(pool, 1)} cores"
            raise ClusterError(f"{given}, needed at most {most}: a rank is a process")


def check_pools(meshes: Mapping[str, Axes], several: Sequence[str], pools: Sequence[str]) -> None:
    """Raises ClusterError for a mesh of a pool that is not there, or whose work is not that of several ranks."""
    for pool, axes in meshes.items():
        if pool not in pools:
            raise ClusterError(f"--mesh {pool}={spelled(axes)}: no such pool, needed one of: {', '.join(pools)}")
        if pool not in several:
            raise ClusterError(
                f"--mesh {pool}={spelled(axes)}: given a pool without a model, needed one of: {', '.join(several)}"
            )

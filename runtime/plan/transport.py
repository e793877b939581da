"""Whether weights can go the way that is asked for between the ranks of a plan. Pure."""

from collections.abc import Sequence

from penstock.runtime.plan.plan import Replica


def why_not(asked: str, source: Replica, replicas: Sequence[Replica]) -> str:
    """What keeps weights from going from `source` to `replicas` in this way ("auto", "messages", "shm", "cuda_ipc"),
    for people; "" if nothing does, as far as a plan can tell.
    """
    if asked in ("auto", "messages"):
        return ""
    for replica in (source, *replicas):
        for number, rank in enumerate(replica.ranks):
            name = f"{replica.name} rank {number}"
            if rank.host != source.ranks[0].host:
                return f"{name} is on host {rank.host}, needed host {source.ranks[0].host} with {source.name}"
            if asked == "cuda_ipc" and rank.device == "cpu":
                return f"{name} is on the CPU, needed a GPU"
            if asked == "shm" and replica is not source and rank.device != "cpu":
                return f"{name} is on {rank.device}, needed the CPU to receive in the host's memory"
    return ""

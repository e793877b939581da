"""Who may say what to the controller, decided here and nowhere else.

A rank speaks for itself, an agent for itself and the ranks of its host, and values are where their maker is. An agent
that carries what its ranks say (`relay`) may say of several of them at once that they have done the same.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, get_args

from msgspec import structs

from penstock.runtime.control.messages import (
    AgentReady,
    Exited,
    Heartbeat,
    Leaving,
    Message,
    Note,
    Question,
    RankMessages,
    Ready,
    Results,
    SendFailed,
    SignsOfLife,
    agent_peer,
    rank_peer,
    shortened,
)
from penstock.runtime.schedule.events import Abort, Failed, ranks_of
from penstock.runtime.tensor.shm import ObjectRef, owner_of

# What a connection of each role may say after its Hello.
SAYS: Mapping[str, tuple[type, ...]] = {
    "agent": (AgentReady, Exited, Heartbeat, Leaving, Note, SignsOfLife, RankMessages),
    "rank": (Ready, Results, SendFailed, Heartbeat, Note),
    "heartbeat": (Heartbeat, Note, *get_args(Question)),
}

# What has a text for people.
_TOLD = (Note, Exited, Failed, Abort, SendFailed)

# Of several ranks of one replica nobody speaks who does not carry for them.
NONE: frozenset[int] = frozenset()
NOBODY: Mapping[str, frozenset[int]] = MappingProxyType({})


def overreach(
    message: Message, peer: str, host: str, ranks: Mapping[str, str], here: Mapping[str, frozenset[int]] = NOBODY
) -> str:
    """What a message claims that `peer`, which is on `host`, may not; "" for none. `ranks` has the host of each rank.
    Where the agent of the host answers for what it says, `here` are the ranks of each replica there."""
    handles = list[ObjectRef]()
    match message:
        case Results(results):
            claimed = set()
            for result in results:
                handles += result.outputs.values()
                if isinstance(event := result.event, Abort):
                    continue
                claimed.add(rank_peer(event.replica, event.rank))
                if len(said := ranks_of(event)) > 1 and not here.get(event.replica, NONE).issuperset(said):
                    return f"{type(event).__name__} of {event.replica} ranks {said[0]} to {said[-1]}"
        case Ready(replica=replica, rank=rank, restored=restored):
            claimed, handles = {rank_peer(replica, rank)}, [handle for _, _, handle in restored]
        case AgentReady(host=named) | Leaving(host=named):
            claimed = {agent_peer(named)}
        case Exited(replica=replica, rank=rank):
            dead = rank_peer(replica, rank)
            return "" if ranks.get(dead) == host else f"Exited of {dead}"
        case _:
            return ""
    if others := claimed - {peer}:
        return f"{type(message).__name__} of {', '.join(sorted(others))}"
    if not handles:
        return ""
    name, _, index = peer.rpartition(":")
    for handle in handles:
        if handle.host not in ("", host) or handle.owner != owner_of(name, int(index)):
            return f"a value of {handle.owner} on host {handle.host}"
    return ""


def readable(message: Any) -> Any:
    """The message with texts of a length that a terminal and a log can take."""
    if isinstance(message, Results):
        for one in message.results:
            if isinstance(one.event, _TOLD):
                return Results(tuple(structs.replace(one, event=readable(one.event)) for one in message.results))
        return message
    if not isinstance(message, _TOLD):
        return message
    texts = ((name, getattr(message, name)) for name in ("text", "tail", "error") if hasattr(message, name))
    return structs.replace(message, **{name: shortened(text) for name, text in texts})

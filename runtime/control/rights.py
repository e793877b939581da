"""Which peer may send the controller which messages. Decided only here.

A rank speaks for itself, an agent for itself and the ranks of its host, and values are where their maker is. An agent
that forwards its ranks' messages (`relay`) may answer for several of them at once.
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
    Untrusted,
    agent_peer,
    rank_peer,
    shortened,
)
from penstock.runtime.schedule.events import Abort, Failed, ranks_of
from penstock.runtime.tensor.shm import ObjectRef, owner_of

# The messages that a connection of each role may send after its Hello.
SAYS: Mapping[str, tuple[type, ...]] = {
    "agent": (AgentReady, Exited, Heartbeat, Leaving, Note, SignsOfLife, RankMessages),
    "rank": (Ready, Results, SendFailed, Untrusted, Heartbeat, Note),
    "heartbeat": (Heartbeat, Note, *get_args(Question)),
}

# Messages with a text for people.
_TOLD = (Note, Exited, Failed, Abort, SendFailed, Untrusted)

# A peer that does not forward for others may not answer for several ranks.
NONE: frozenset[int] = frozenset()
NOBODY: Mapping[str, frozenset[int]] = MappingProxyType({})


def overreach(
    message: Message, peer: str, host: str, ranks: Mapping[str, str], here: Mapping[str, frozenset[int]] = NOBODY
) -> str:
    """What a message claims that `peer`, which is on `host`, may not claim; "" for nothing. `ranks` has the host of
    each rank. If the host's agent forwards the message, `here` are the ranks of each replica on that host."""
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
    """The message with texts shortened for terminals and logs."""
    if isinstance(message, Results):
        for one in message.results:
            if isinstance(one.event, _TOLD):
                return Results(tuple(structs.replace(one, event=readable(one.event)) for one in message.results))
        return message
    if not isinstance(message, _TOLD):
        return message
    texts = ((name, getattr(message, name)) for name in ("text", "tail", "error") if hasattr(message, name))
    return structs.replace(message, **{name: shortened(text) for name, text in texts})

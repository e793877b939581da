"""Turns: two steps that alternate on one group, the one bounded cycle without a lag.

The turns begin when the inputs of both steps are there. The step that speaks fires for turn 0 as any step does. When it
is done, the one that answers fires for that turn; its answer is another turn, or the end. What a turn has made stays
until the next one has read it; after the last turn it is the group's, as if there had been no other. A cut does not
keep turns: a group in the middle starts again.
"""

import heapq

from penstock.graph.ir import Firing
from penstock.runtime.schedule.events import Settle
from penstock.runtime.schedule.ledger import Group, Talk
from penstock.runtime.schedule.state import State
from penstock.runtime.schedule.tables import Step


def spoken(state: State, group: Group, step: Step, firing: Firing, replica: str) -> None:
    """The step that speaks is done with a turn: what the turn before has made is read, and the answer is due."""
    talk = group.talks.setdefault(step.name, Talk())
    answers = state.tables.steps[step.partner]
    recalled = {made: holder for made, holder in talk.made.items() if answers.recalls and made.node == answers.name}
    for made, holder in talk.made.items():
        if made not in recalled:
            state.free(made, holder)
    talk.made = {**recalled, firing: replica}
    heapq.heappush(state.ready[step.partner], group.ordinal)


def answered(state: State, group: Group, step: Step, firing: Firing, replica: str, again: bool) -> bool:
    """The step that answers is done with a turn; true if it was the group's last one."""
    talk = group.talks[step.partner]
    for made in [made for made in talk.made if made.node == step.name]:  # what it recalled
        state.free(made, talk.made.pop(made))
    talk.made[firing] = replica
    if again and talk.turn + 1 < step.turns:
        talk.turn += 1
        heapq.heappush(state.ready[step.partner], group.ordinal)
        return False
    if firing.turn > 0:
        state.say_freed()  # what was recalled of turn 0 has the name that is settled now
        for made, holder in talk.made.items():
            state.out.append(Settle(made, holder))
    return True


def finish(group: Group, step: Step) -> dict[str, str]:
    """Forget the turns of a group; the names of the two steps with the replicas that hold what they have made."""
    return {made.node: holder for made, holder in group.talks.pop(step.partner).made.items()}

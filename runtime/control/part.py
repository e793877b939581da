"""A rank's part of a checkpoint: what it holds, and those of its values that unfinished groups need."""

import json
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from penstock.graph.ir import Firing
from penstock.runtime.control.holdings import Holdings
from penstock.runtime.control.values import Values
from penstock.runtime.record.checkpoint import update_of
from penstock.runtime.tensor.checkpoint import layout_of, read_part, value_name, write_part
from penstock.runtime.tensor.codec import decode, encode
from penstock.runtime.tensor.handle import Handle


def require_savable(holdings: Holdings) -> None:
    """Raises TypeError for a state that no checkpoint can hold, naming its node or carried value: it is found at the
    start, not by the first checkpoint, after the training."""
    for name, held in holdings.nodes.items():
        if held.stateful:
            try:
                tensors, meta = encode(held.state)
                decode(type(held.state), tensors, json.loads(json.dumps(meta)))
            except Exception as error:
                where = f", written at {held.node.where}" if held.node.where else ""
                raise TypeError(f"the state of node {name}{where}, cannot be kept in a checkpoint: {error}") from error
    for name, value in holdings.carried.items():
        own, facts = value.state()
        wrong = [f"{key}, a {type(given).__name__}" for key, given in own.items() if not isinstance(given, Tensor)]
        if wrong:
            raise TypeError(f"the state of {name} cannot be kept in a checkpoint: given {wrong[0]}, needed tensors")
        try:
            json.dumps(facts)
        except (TypeError, ValueError) as error:
            needed = "needed facts that JSON can keep beside the tensors"
            raise TypeError(f"the state of {name} cannot be kept in a checkpoint: {error}; {needed}") from error


def save(name: str, update: int, firings: Iterable[Firing], holdings: Holdings, values: Values) -> None:
    """Write this rank's part of the cut before `update`: carried values, states, and the outputs of `firings`. `name`
    is that of the folder of all parts of this cut."""
    setup = holdings.setup
    folder = setup.folder / "checkpoints" / name
    states = {name: held.state for name, held in holdings.nodes.items() if held.node.stateful}
    earlier = {_earlier(name, version): value for name, version, value in holdings.history.before(update)}
    ranks = len(setup.plan.replica(setup.replica).ranks)
    kept = values.of(firings)
    write_part(folder, setup.replica, setup.rank, ranks, holdings.carried, states, kept, earlier, setup.run)


def restore(folder: Path, holdings: Holdings, values: Values) -> list[tuple[Firing, str, Handle]]:
    """Take up this rank's part of a cut; the handles of its values that other processes read."""
    setup, update = holdings.setup, update_of(folder.name)
    part = read_part(folder, setup.replica, setup.rank, setup.run)
    for name, value in holdings.carried.items():
        value.restore(*part.carried(name, layout_of(value)))
        holdings.history.note(name, update, value)
    for name, lag in holdings.history.lags.items():
        for version in range(max(0, update - lag), update):
            value = holdings.make(name)
            value.restore(*part.carried(_earlier(name, version), layout_of(value)))
            holdings.history.note(name, version, value)
    for name, held in holdings.nodes.items():
        if held.node.stateful:
            held.state = part.value(f"state/{name}", type(held.state))
    restored = []
    for firing, output in part.made:
        value = part.value(value_name(firing, output), setup.declared(firing, output))
        restored += [(firing, name, handle) for name, handle in values.keep(firing, {output: value}).items()]
    return restored


def _earlier(name: str, version: int) -> str:
    return f"{name}@{version}"

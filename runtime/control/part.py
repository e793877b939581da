"""A rank's part of a checkpoint: what it holds, and those of its values that unfinished groups need."""

from collections.abc import Iterable
from pathlib import Path

from penstock.graph.ir import Firing
from penstock.runtime.control.holdings import Holdings
from penstock.runtime.control.values import Values
from penstock.runtime.record.checkpoint import update_of
from penstock.runtime.tensor.checkpoint import layout_of, read_part, value_name, write_part
from penstock.runtime.tensor.handle import Handle


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

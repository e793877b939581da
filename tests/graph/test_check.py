"""`check` finds each fault, with its code, what was given and its line; and all faults at once."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from penstock.graph import Fault, Graph, GraphError, check, load, trace
from penstock.graph.ir import Argument, Input, Ref
from tests.faults import assert_told, marked

FILE = Path(__file__).with_name("programs_with_faults.py")
PROGRAMS = Path(__file__).with_name("programs_for_tests.py")
MARKED = marked(FILE)


@pytest.mark.parametrize("name", MARKED)
def test_a_program_is_told_what_is_marked_in_it_and_nothing_else(name: str) -> None:
    assert_told(FILE, name, MARKED[name])


def test_a_fault_reads_well() -> None:
    fault = Fault("wrong-type", "score: input 'rollouts'", "Prompts (from prompts)", "Rollouts", "my.py:7")
    assert str(fault) == (
        "my.py:7: score: input 'rollouts' [wrong-type]\n    given   Prompts (from prompts)\n    needed  Rollouts"
    )


@pytest.mark.parametrize(
    ("code", "options", "batch", "given"),
    [
        *(("bad-lag", {"lag": lag}, None, repr(lag)) for lag in (-1, 1.5, True, "2")),
        ("bad-lag", {"lag": None}, None, "None, for the weights of 'policy', which updates change"),
        *(("bad-samples", {"samples": samples}, None, repr(samples)) for samples in (0, -3, 2.5)),
        *(("bad-batch", {}, batch, repr(batch)) for batch in (0, -1, 2.0, True)),
    ],
)
def test_numbers_that_cannot_work(code: str, options: dict[str, Any], batch: Any, given: str) -> None:
    (fault,) = check(trace(load(f"{FILE}:sound"), options), batch=batch)
    assert (fault.code, fault.given) == (code, given)
    assert "a whole number of" in fault.needed


SOUND = trace(load(f"{FILE}:sound"))


def edited(name: str, **changes: Any) -> dict[str, Any]:
    return {"nodes": tuple(dataclasses.replace(n, **changes) if n.name == name else n for n in SOUND.nodes)}


@pytest.mark.parametrize(
    "changes",
    [
        edited("score", inputs=(Input("rollouts", SOUND["score"].inputs[0].type, Ref("genrate")),)),
        edited("score", inputs=(Input("rollouts", SOUND["score"].inputs[0].type, Ref("generate", "1")),)),
        edited("score", inputs=(*SOUND["score"].inputs, Input("again", "m:X", Ref("score")))),
        edited("score", inputs=(Input("rollouts", "m:X", Ref("generate"), back=True),)),
        edited("score", lag=1),
        edited("broadcast", inputs=SOUND["broadcast"].inputs * 2),
        edited("score", construct="keep", inputs=SOUND["learn"].inputs),
        {"nodes": (*SOUND.nodes, SOUND["score"])},
        {"nodes": SOUND.nodes[::-1]},
        {"arguments": SOUND.arguments[:1]},
        {"arguments": (*SOUND.arguments, Argument("old", "carried", "m:P", "m:make", "trainer"))},
        {"results": ()},
        {"results": SOUND.results * 2},
        {"results": (("policy", Ref("lern")),)},
        {"results": (*SOUND.results, ("prompts", Ref("prompts")))},
    ],
)
def test_what_no_program_makes_is_no_graph(changes: dict[str, Any]) -> None:
    with pytest.raises(GraphError) as raised:
        SOUND.replace(**changes)
    assert [fault.code for fault in raised.value.faults] == ["malformed-graph"]


def test_an_empty_graph_has_no_fault() -> None:
    assert check(Graph("empty", "", (), (), ())) == []

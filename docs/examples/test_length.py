import torch
from length import ends_with, priced

from penstock import Batchable, Rewards, check, group_advantage, trace


def test_the_advantages_of_a_group_add_up_to_nothing() -> None:
    advantages = group_advantage(Rewards(torch.tensor([1.0, 0.0, 0.0, 1.0])))
    assert advantages.values_N.tolist() == [0.5, -0.5, -0.5, 0.5]


def test_the_rule_reads_the_end() -> None:
    assert ends_with("2+2=", "4", "4") == 1.0


def test_the_program_has_no_fault() -> None:
    graph = trace(priced, {"lag": 3})
    assert graph["broadcast"].lag == 3
    assert not check(graph, batch=8)
    assert issubclass(Rewards, Batchable)

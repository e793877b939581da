"""The printed forms of a graph, text that reads like the program and Mermaid; and its JSON files."""

from pathlib import Path

from penstock.graph import alternate, node, program, trace
from penstock.graph.types import Policy, Prompts, Rewards

PROGRAMS = Path(__file__).with_name("programs_for_tests.py")

LONG = """\
def long(policy: Policy, prompts: Prompts):
    rewards, judge_1 = judge(prompts)                                         # default, per group
    learn_out = learn(policy, rewards)                                        # default, per update
    return learn(learn_out, judge_1, name='a name that is long', alpha=0.25,  # learn_2, default, per update
                 betas=(0.5, 0.75))"""


@node(clock="update")
def learn(
    policy: Policy, rewards: Rewards, *, alpha: float = 0.5, betas: tuple[float, float] = (0.9, 0.95), name: str = "a b"
) -> Policy: ...
@node
def judge(prompts: Prompts) -> tuple[Rewards, Rewards]: ...


def test_long_calls_are_wrapped_between_arguments_and_names_are_never_shared() -> None:
    @program
    def long(policy: Policy, prompts: Prompts) -> Policy:
        good, fair = judge(prompts)
        return learn(learn(policy, good), fair, name="a name that is long", alpha=0.25, betas=(0.5, 0.75))

    assert str(trace(long)) == LONG


@node(clock="update")
def weigh(policy: Policy, rewards: Rewards, hints: Rewards | None = None, doubts: Rewards | None = None) -> Policy: ...


def test_an_input_behind_one_that_was_left_out_is_printed_by_keyword() -> None:
    @program
    def skips(policy: Policy, prompts: Prompts) -> Policy:
        good, fair = judge(prompts)
        return weigh(weigh(policy, good, doubts=fair), good, None, fair)

    @program
    def whole(policy: Policy, prompts: Prompts) -> Policy:
        good, fair = judge(prompts)
        return weigh(policy, good, doubts=fair, hints=fair)

    printed = str(trace(skips))
    assert "weigh_out = weigh(policy, rewards, doubts=doubts)" in printed
    assert "return weigh(weigh_out, rewards, doubts=doubts)" in printed
    assert "return weigh(policy, rewards, hints, hints)" in str(trace(whole))


@node
def speak(
    prompts: Prompts,
    hints: Rewards | None = None,
    notes: Rewards | None = None,
    conversation: Rewards | None = None,
    replies: Rewards | None = None,
) -> Rewards: ...
@node
def answer(rewards: Rewards) -> Rewards: ...


def test_two_nodes_that_take_turns_are_printed_as_they_may_be_called() -> None:
    @program
    def talk(policy: Policy, prompts: Prompts) -> Policy:
        good, _ = judge(prompts)
        said, _ = alternate(speak, answer, prompts, None, good, turns=2)
        return learn(policy, said)

    @program
    def by_keyword(policy: Policy, prompts: Prompts) -> Policy:
        good, _ = judge(prompts)
        said, _ = alternate(speak, answer, prompts, turns=2, notes=good)
        return learn(policy, said)

    assert "alternate(speak, answer, prompts, notes=notes, turns=2)" in str(trace(talk))
    assert str(trace(talk)).splitlines()[1:] == str(trace(by_keyword)).splitlines()[1:]

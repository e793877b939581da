"""What people see: text that reads like the program, Mermaid; and JSON files."""

from pathlib import Path

import pytest

from penstock.graph import alternate, load, node, program, trace
from penstock.graph.show import mermaid, text
from penstock.graph.types import Policy, Prompts, Rewards

PROGRAMS = Path(__file__).with_name("programs_for_tests.py")

AIPO = '''\
def aipo(policy: Policy, prompts: Prompts, *, lag=1, rho=4.0, samples=8):
    """Asynchronous importance-weighted policy optimisation."""
    behaviour = broadcast(policy, lag=1)                      # to generator
    rollouts = generate(prompts, behaviour, samples=8)        # generator, per group
    rewards = score(rollouts, by=math_answer)                 # scorer, per group
    advantage = group_advantage(rewards)                      # scorer, per group
    return aipo_update(policy, rollouts, advantage, rho=4.0)  # trainer, per update'''

ACTOR_CRITIC = '''\
def actor_critic(policy: Policy, critic: Critic, prompts: Prompts, *, lag=1):
    """Two carried values: the critic learns beside the policy."""
    behaviour = broadcast(policy, lag=1)                    # to generator
    rollouts = generate(prompts, behaviour)                 # generator, per group
    rewards = score(rollouts)                               # scorer, per group
    weights = broadcast(critic, lag=2)                      # broadcast_2, to critic
    values = estimate(rollouts, weights)                    # critic, per group
    advantage = advantages(rewards, values)                 # scorer, per group
    next_critic = critic_update(critic, rollouts, rewards)  # critic, per update
    next_policy = aipo_update(policy, rollouts, advantage)  # trainer, per update
    return {"policy": next_policy, "critic": next_critic}'''

EVALUATE = '''\
def evaluate(policy: Policy, prompts: Prompts):
    """Accuracy on held-out problems."""
    behaviour = broadcast(policy, lag=0)                # evaluate.broadcast, to generator
    rollouts = generate(prompts, behaviour, samples=1)  # evaluate.generate, generator, per group
    rewards = score(rollouts)                           # evaluate.score, scorer, per group
    accuracy(rewards)                                   # evaluate.accuracy, scorer, per update
    return policy'''

LONG = """\
def long(policy: Policy, prompts: Prompts):
    rewards, judge_1 = judge(prompts)                                         # default, per group
    learn_out = learn(policy, rewards)                                        # default, per update
    return learn(learn_out, judge_1, name='a name that is long', alpha=0.25,  # learn_2, default, per update
                 betas=(0.5, 0.75))"""


@pytest.mark.parametrize(
    ("name", "prefix", "expected"),
    [("aipo", "", AIPO), ("actor_critic", "", ACTOR_CRITIC), ("evaluate", "evaluate.", EVALUATE)],
)
def test_a_graph_reads_like_its_program(name: str, prefix: str, expected: str) -> None:
    assert str(trace(load(f"{PROGRAMS}:{name}"), prefix=prefix)) == expected


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


def test_mermaid_has_a_box_per_node_and_dashes_for_feedback() -> None:
    assert mermaid(trace(load(f"{PROGRAMS}:aipo"))) == (
        "flowchart LR\n"
        '  subgraph p0["generator"]\n'
        '    n0(["prompts<br/>source"])\n'
        '    n1["generate<br/>samples=8"]\n'
        "  end\n"
        '  subgraph p1["scorer"]\n'
        '    n2["score<br/>by=math_answer"]\n'
        '    n3["group_advantage<br/>per group"]\n'
        "  end\n"
        '  subgraph p2["trainer"]\n'
        '    n4["aipo_update<br/>per update, rho=4.0"]\n'
        "  end\n"
        '  n0 -->|"Prompts"| n1\n'
        '  n4 -.->|"policy, lag=1"| n1\n'
        '  n1 -->|"Rollouts"| n2\n'
        '  n2 -->|"Rewards"| n3\n'
        '  n4 -.->|"policy"| n4\n'
        '  n1 -->|"Rollouts"| n4\n'
        '  n3 -->|"Advantages"| n4\n'
    )


def test_text_is_what_print_prints() -> None:
    graph = trace(load(f"{PROGRAMS}:aipo"))
    assert text(graph) == str(graph)
    assert repr(graph).startswith("Graph(name='aipo'")

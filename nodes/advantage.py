"""Advantages, how much better a response is than expected: nodes that compute them from rewards.

Nodes that compare within a prompt group fire per group, those that compare within a batch per update. They are built of
functions of rewards and groups. Rewards are data, so nothing here has a gradient.

Shapes: N responses, G prompts. `group_N` (int64) says which prompt each response answers, 0 to G − 1, each at least
once and in any order; `rewards_N` are floating point. Rows may also be tokens: the functions do not assume responses.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable

import torch
from torch import Tensor

from penstock.graph import node, requires
from penstock.graph.requires import Call
from penstock.graph.types import Advantages, Mean, Metrics, Prefixes, Rewards, Rollouts, TokenAdvantages
from penstock.nodes.learn.batching import group_rows, of_its_rows, sampled_mask
from penstock.nodes.learn.losses import segment_lengths, segment_max, segment_mean, segment_sum

# Rewards that differ by no more than this many units in the last place count as equal.
ROUNDING = 4


def uniform_groups(rewards_N: Tensor, group_N: Tensor) -> Tensor:
    """True for each group whose rewards are all equal (all right, all wrong, or a single one), bool [G]: nothing to
    learn.

    Dynamic sampling drops these groups: DAPO (arXiv 2503.14476), equation 11. Rewards that differ by a few units in the
    last place are equal, since sums of the same parts in another order do, unless these cancel: divided by the group's
    deviation, such a difference would be as large as any other.
    """
    # By the rewards themselves: the mean of equal ones may differ from them in the last bit.
    most_G, least_G = segment_max(rewards_N, group_N), -segment_max(-rewards_N, group_N)
    largest_G = torch.maximum(most_G.abs(), least_G.abs())
    near_G = most_G - least_G <= ROUNDING * torch.finfo(rewards_N.dtype).eps * largest_G
    return (most_G == least_G) | (near_G & largest_G.isfinite())


def group_mean_advantages(rewards_N: Tensor, group_N: Tensor) -> Tensor:
    """A = r − mean of the group; exactly 0 in a uniform group.

    LlamaRL (arXiv 2505.24034), section 6; Dr. GRPO (arXiv 2503.20783), section 3.2, which is GRPO without the division.
    """
    exact_N = rewards_N.double()  # in float32, a mean of nearly equal rewards may be one of them
    centred_N = (exact_N - segment_mean(exact_N, group_N)[group_N]).to(rewards_N.dtype)
    return centred_N.masked_fill(uniform_groups(rewards_N, group_N)[group_N], 0.0)


def grpo_advantages(rewards_N: Tensor, group_N: Tensor, *, correction: int = 0) -> Tensor:
    """A = (r − mean of the group) / deviation of the group; exactly 0 in a uniform group.

    GRPO (DeepSeekMath, arXiv 2402.03300), section 4.1.2, which does not say which deviation: `correction` 0 divides
    the squares by n (population), 1 by n − 1 (sample, what torch.std does unasked). No ε is added to it.
    """
    # In float64: the squares of small or large rewards are no float32.
    centred_N = group_mean_advantages(rewards_N, group_N).double()
    degrees_G = (segment_lengths(group_N) - correction).clamp(min=1)
    mean_square_N = segment_mean(centred_N.square(), group_N)[group_N]
    # No ε below the root: groups of equal rewards, whose variance is 0, are masked by their rewards instead.
    variance_N = mean_square_N * (segment_lengths(group_N) / degrees_G)[group_N]
    made_N = (centred_N / variance_N.sqrt()).masked_fill(uniform_groups(rewards_N, group_N)[group_N], 0.0)
    return made_N.to(rewards_N.dtype)


def rloo_advantages(rewards_N: Tensor, group_N: Tensor) -> Tensor:
    """A = r − mean of the group's other rewards, which is n / (n − 1) · (r − mean of the group).

    RLOO (Ahmadian et al. 2024, arXiv 2402.14740), the REINFORCE leave-one-out estimator. ValueError for a group of one.
    """
    lengths_G = segment_lengths(group_N)
    if int(lengths_G.min()) < 2:
        group = int(lengths_G.argmin())
        raise ValueError(f"rloo_advantages: given {int(lengths_G[group])} samples in group {group}, needed 2 or more")
    return group_mean_advantages(rewards_N, group_N) * (lengths_G / (lengths_G - 1))[group_N]


def whiten(values_P: Tensor, mask_P: Tensor) -> Tensor:
    """Values of mean 0 and population deviation 1 over the rows where `mask_P` (bool) holds; 0 elsewhere.

    All are 0 if the values do not differ.
    """
    kept_K = values_P[mask_P]
    white_K = grpo_advantages(kept_K, torch.zeros_like(kept_K, dtype=torch.long))
    return torch.zeros_like(values_P).masked_scatter(mask_P, white_K)


OTHERS = "2 or more responses to a prompt, since they are each other's baseline (option samples)"


def several_samples(call: Call) -> None:
    """Requirement of a node that compares the rewards of one prompt: several of them."""
    if call.samples("rewards") == 1:
        raise call.lack("rewards of samples=1, one response to a prompt", OTHERS, code="too-few-samples")


def one_greedy(call: Call) -> None:
    """Requirement of a node whose baseline is the reward of one greedy response to the prompt of a group."""
    if call.clock == "update":
        needed = "a call that fires per group: it does not see which rows of a batch answer the same prompt"
        raise call.lack("a whole batch (per_update)", needed, code="whole-batch")
    if (samples := call.samples("greedy")) not in (None, 1):
        needed = "samples=1: one greedy response to each prompt"
        raise call.lack(f"greedy rewards of samples={samples}", needed, code="too-many-samples")


# The sub-group of each row of rollouts: anything that equals itself, such as a text or a number; or a tensor.
By = Callable[[Rollouts], Iterable[Hashable]]


def named_rows(call: Call) -> None:
    """Requirement of a node that compares rows with each other: where these are not all of a group, the rollouts."""
    if "rollouts" not in call.left_out:
        return
    needed = "the rollouts, as the input `rollouts`"
    if call.options["by"] is not None:
        raise call.lack("sub-groups of no rollouts", needed, "by", code="missing-rollouts")
    if call.branched("rewards"):
        given, whose = "rewards of responses that go on from prefixes, without these", "prefix"
    elif call.clock == "update":
        given, whose = "rewards of a whole batch, without its rollouts", "prompt"
    elif (prompts := call.prompts("rewards")) > 1:
        given, whose = f"rewards of groups of {prompts} prompts, without their rollouts", "prompt"
    else:
        return
    needed += f": those of one {whose} are compared with each other"
    raise call.lack(given, needed, input="rewards", code="missing-rollouts")


@requires(of_its_rows, several_samples, named_rows)
@node(pool="scorer")
def group_advantage(
    rewards: Rewards, rollouts: Rollouts | None = None, *, normalize: bool = False, by: By | None = None
) -> Advantages:
    """A = r − mean of the rewards of the same prompt's samples (LlamaRL, arXiv 2505.24034, section 6).

    That is Dr. GRPO's advantage too (arXiv 2503.20783). With `normalize` it is divided by the group's standard
    deviation, as in GRPO (arXiv 2402.03300, section 4.1.2); a group whose rewards are all equal has advantage 0 either
    way. Raises ValueError for a group of one, whose advantage is always 0.

    With the `rollouts`, rows are compared within their prompt only, also in a whole batch (`per_update`). Rollouts that
    continue prefixes have a sub-group for each prefix; `by(rollouts)` divides them further. A row that is alone in its
    sub-group has advantage 0.
    """
    values_N = _samples(rewards, "group_advantage", rollouts)
    make = grpo_advantages if normalize else group_mean_advantages
    return Advantages(make(values_N, _groups(values_N, rollouts, by)) if len(values_N) else values_N)


@requires(of_its_rows, several_samples, named_rows)
@node(pool="scorer")
def leave_one_out_advantage(rewards: Rewards, rollouts: Rollouts | None = None, *, by: By | None = None) -> Advantages:
    """A = r − mean of the rewards of the same prompt's other samples (RLOO, arXiv 2402.14740).

    With sub-groups, as in `group_advantage`, only samples of the same sub-group count. Raises ValueError for a row that
    is alone.
    """
    values_N = _samples(rewards, "leave_one_out_advantage", rollouts)
    return Advantages(rloo_advantages(values_N, _groups(values_N, rollouts, by)) if len(values_N) else values_N)


@requires(of_its_rows, several_samples)
@node(pool="scorer")
def vine_advantage(
    rewards: Rewards, rollouts: Rollouts, prefixes: Prefixes, vines: Rollouts, outcomes: Rewards
) -> tuple[TokenAdvantages, Metrics]:
    """The advantage of each step of a response, by Monte-Carlo values (VinePPO, arXiv 2410.01679, equations 5 and 6).

    `prefixes` cut `rollouts` into steps; `vines` are responses that continue each prefix, and `outcomes` their rewards,
    whose mean is the value of that state. All tokens of a step have A = V(state after it) − V(state before it). The
    state after the last step has the response's reward as its value, and the prompt the mean reward of the other
    responses to it: a prefix of 0 tokens has a value of its own. Metric: `state_value`, the mean of the prefixes'
    values.

    Raises ValueError for a single response, for a prefix without vines, and for vines of other prefixes.
    """
    values_N = _samples(rewards, "vine_advantage")
    # Prefixes and rows are numbered in each group.
    places = {key: m for m, key in enumerate(zip(prefixes.ordinals, prefixes.numbers_N.tolist(), strict=True))}
    continued = None if vines.prefixes_N is None else [*zip(vines.ordinals, vines.prefixes_N.tolist(), strict=True)]
    if continued is None or len(outcomes.values_N) != len(vines) or {*continued} != {*places}:
        given = f"{len(vines)} vines with {len(outcomes.values_N)} outcomes, of {len(places)} prefixes"
        raise ValueError(f"vine_advantage: given {given}, needed one or more, with an outcome each, after each prefix")
    of_K = torch.tensor([places[key] for key in continued], dtype=torch.long)
    outcomes_K = torch.as_tensor(outcomes.values_N, dtype=torch.float32)
    states_M = segment_mean(outcomes_K, of_K, len(places)) if places else outcomes_K
    group_N = group_rows(rollouts.groups)
    lengths_N = segment_lengths(group_N)[group_N]
    if int(lengths_N.min()) < 2:
        raise ValueError(f"vine_advantage: given 1 sample for a prompt, needed {OTHERS}")
    others_N = (segment_sum(values_N, group_N)[group_N] - values_N) / (lengths_N - 1)
    advantages_NT = torch.zeros(rollouts.versions_NT.shape, dtype=torch.float32)
    of_row, before = defaultdict[tuple[int, int], list[int]](list), Counter[int]()
    for m, place in enumerate(zip(prefixes.ordinals, prefixes.rows_N.tolist(), strict=True)):
        of_row[place].append(m)
    for row, (ordinal, length) in enumerate(zip(rollouts.ordinals, rollouts.response_lengths_N.tolist(), strict=True)):
        own = of_row[ordinal, before[ordinal]]
        before[ordinal] += 1
        bounds = [0, *prefixes.lengths_N[own].tolist(), length]
        worth = [float(others_N[row]), *states_M[own].tolist(), float(values_N[row])]
        for step in range(len(own) + 1):
            advantages_NT[row, bounds[step] : bounds[step + 1]] = worth[step + 1] - worth[step]
    return TokenAdvantages(advantages_NT), {"state_value": Mean.of(states_M.tolist())}


@node(pool="scorer")
def plain_advantage(rewards: Rewards, *, baseline: float = 0.0) -> Advantages:
    """A = r − b: the reward minus a constant (REINFORCE, Williams 1992)."""
    return Advantages(torch.as_tensor(rewards.values_N, dtype=torch.float32) - baseline)


@requires(one_greedy)
@node(pool="scorer")
def greedy_advantage(rewards: Rewards, greedy: Rewards) -> Advantages:
    """A = r − reward of the greedy response to the same prompt (ReMax, arXiv 2310.10505, section 4)."""
    if len(greedy.values_N) != 1:
        raise ValueError(f"greedy_advantage: given {len(greedy.values_N)} greedy responses to a prompt, needed one")
    values_N = torch.as_tensor(rewards.values_N, dtype=torch.float32)
    return Advantages(values_N - torch.as_tensor(greedy.values_N))


@requires(of_its_rows)
@node(pool="scorer", clock="update")
def batch_normalized(advantage: Advantages, rollouts: Rollouts | None = None) -> Advantages:
    """(A − mean) / population deviation over the responses of a whole batch. All are 0 if they do not differ.

    REINFORCE++ (Hu et al. 2025, arXiv 2501.03262), global advantage normalisation; with advantages of
    `group_advantage`, REINFORCE++ with baseline. Advantages of tokens need the `rollouts`: they are normalised over the
    tokens that a policy sampled, and are 0 elsewhere. Raises ValueError without them.
    """
    if not isinstance(advantage, TokenAdvantages):
        return Advantages(whiten(advantage.values_N, torch.ones_like(advantage.values_N, dtype=torch.bool)))
    # The padding of shorter responses is 0, and would count as tokens with advantage 0.
    if rollouts is None:
        raise ValueError("batch_normalized: given advantages of tokens, needed their rollouts, as the input `rollouts`")
    return TokenAdvantages(whiten(advantage.values_N, sampled_mask(rollouts)))


def _samples(rewards: Rewards, name: str, rollouts: Rollouts | None = None) -> Tensor:
    """The rewards of a group to compare, float32 [N]. Only rollouts that continue prefixes may have no rows."""
    values_N = torch.as_tensor(rewards.values_N, dtype=torch.float32)
    may_be_empty = rollouts is not None and rollouts.prefixes_N is not None
    if len(values_N) < 2 and not (may_be_empty and not len(values_N)):
        raise ValueError(f"{name}: given {len(values_N)} sample for a prompt, needed {OTHERS}")
    return values_N


def _groups(values_N: Tensor, rollouts: Rollouts | None, by: By | None) -> Tensor:
    """The number of each row's sub-group, int64 [N]."""
    if by is not None and rollouts is None:
        raise ValueError("advantage: given sub-groups (by) of no rollouts, needed the input `rollouts`")
    if rollouts is None:
        return torch.zeros(len(values_N), dtype=torch.long)
    prefixes = [-1] * len(rollouts) if rollouts.prefixes_N is None else rollouts.prefixes_N.tolist()
    named = [None] * len(rollouts) if by is None else by(rollouts)
    # Elements of a tensor compare equal only as plain numbers.
    names = [name.item() if hasattr(name, "item") else name for name in named]
    if len(rollouts) != len(values_N):
        raise ValueError(f"advantage: given {len(values_N)} rewards of {len(rollouts)} rollouts, needed one for each")
    if len(names) != len(values_N):
        given = f"by={getattr(by, '__name__', repr(by))}: given {len(names)} names of sub-groups"
        raise ValueError(f"{given}, needed {len(values_N)}, one for each row")
    return group_rows(list(zip(rollouts.groups, prefixes, names, strict=True)))

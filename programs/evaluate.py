"""The share of problems that the policy solves with greedy decoding.

prompts → generate → score → accuracy
  policy ⇢ generate: weights
"""

from penstock.graph import broadcast, program
from penstock.graph.types import Policy, Prompts
from penstock.nodes.generate import generate
from penstock.nodes.score import accuracy, math_answer, score


@program
def evaluate(policy: Policy, prompts: Prompts) -> Policy:
    """Greedy accuracy on the problems of --data; as an evaluation, on held-out ones.

    Each gets one response. The problems of --data are those that a program trains on: a tenth is held out for its
    evaluation. An update measures the next --batch of them; the metric is `accuracy`.
    """
    behaviour = broadcast(policy)
    rollouts = generate(prompts, behaviour, samples=1, temperature=0.0)
    rewards = score(rollouts, by=math_answer)
    accuracy(rewards)
    return policy

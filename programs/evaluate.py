"""The share of problems that the policy solves with greedy decoding.

prompts → generate → score → accuracy
  policy ⇢ generate: weights
"""

from penstock.graph import broadcast, program
from penstock.graph.types import Policy, Prompts
from penstock.nodes.generate import generate
from penstock.nodes.score import accuracy, math_answer, score


@program(defaults={"updates": 1, "batch": 500})
def evaluate(policy: Policy, prompts: Prompts) -> Policy:
    """Greedy accuracy on the problems of --data; as an evaluation, on held-out ones.

    On --batch of them, or on all if there are fewer; each gets one response. The metric is `accuracy`. A further update
    measures the next ones.
    """
    behaviour = broadcast(policy)
    rollouts = generate(prompts, behaviour, samples=1, temperature=0.0)
    rewards = score(rollouts, by=math_answer)
    accuracy(rewards)
    return policy

"""The share of held-out problems that the policy solves with greedy decoding.

prompts → generate → score → accuracy
  policy ⇢ generate: weights
"""

from penstock.graph import broadcast, program
from penstock.graph.types import Policy, Prompts
from penstock.nodes.generate import generate
from penstock.nodes.score import accuracy, math_answer, score


@program
def evaluate(policy: Policy, prompts: Prompts) -> Policy:
    """Greedy accuracy on held-out problems, one response each."""
    behaviour = broadcast(policy)
    rollouts = generate(prompts, behaviour, samples=1, temperature=0.0)
    rewards = score(rollouts, by=math_answer)
    accuracy(rewards)
    return policy

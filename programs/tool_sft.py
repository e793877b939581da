"""The base model of `tool_use`: supervised fine-tuning on a teacher that knows the Python tool but seldom calls it.

demonstrations → sft_update → policy
"""

from penstock.graph import program
from penstock.graph.types import Policy
from penstock.nodes.data import ToolDemonstrations
from penstock.nodes.learn.sft import sft_update
from penstock.programs.tool_use import calculate

DEFAULTS = {"model": "new", "data": "calculator", "updates": 800, "batch": 2, "max_tokens": 24, "max_prompt": 96}


@program(evaluation=calculate, defaults=DEFAULTS)
def tool_sft(policy: Policy, demonstrations: ToolDemonstrations, *, lr: float = 2e-3, sandbox: bool = True) -> Policy:
    """Supervised fine-tuning on sums and differences, 32 in a group; some with a call of the tool.

    The tool's output is imitated, too. That does no harm: in a conversation the tool itself writes its output.

    Args:
        lr: highest learning rate of AdamW; it warms up, then falls along a cosine to 0 at the run's end.
        sandbox: isolate the evaluated model's code by bubblewrap; without, it runs with your rights.
    """
    return sft_update(policy, demonstrations, lr=lr)

"""A reward model from preferences (InstructGPT, Ouyang et al. 2022, arXiv 2203.02155, section 3.5): of two responses to
a prompt, the preferred one should get the higher score.

    pairs ─► preference_update ─► reward_model

Checkpoints have the model in `reward_model/`, a directory for `rlhf --reward-model` and for `transformers`
(LlamaForSequenceClassification), which scores a text up to its end token. Its pad token is no end token; a tokenizer
without one to spare has none, and takes no batches. Left out: rankings of more than two responses, margins, ties.
"""

from penstock.graph import program
from penstock.graph.types import PreferenceModel
from penstock.nodes.data import Pairs
from penstock.nodes.reward_model import preference_update


@program(defaults={"updates": 300, "batch": 4})
def reward_model(reward_model: PreferenceModel, pairs: Pairs, *, lr: float = 1e-3) -> PreferenceModel:
    """A reward model that learns from pairs, 32 in a group, by the Bradley-Terry loss (arXiv 2203.02155, equation 1).

    `--data` is "arithmetic", right answers against wrong ones, or a JSONL file with prompt, chosen and rejected.

    Args:
        lr: learning rate of AdamW; a model of a billion parameters wants 1e-5.
    """
    return preference_update(reward_model, pairs, lr=lr)

"""AIPO whose generator dies once, while vLLM loads the third version of the weights, or whose vLLM loads wrong ones."""

import os
import signal
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from penstock.graph import broadcast, node, program
from penstock.graph.context import Context
from penstock.graph.types import Metrics, Policy, Prompts, Rollouts, Weights
from penstock.nodes.advantage import group_advantage
from penstock.nodes.generate import open_engine
from penstock.nodes.generate.groups import GroupStream
from penstock.nodes.learn.update import aipo_update
from penstock.nodes.score import math_answer, score


def open_dying(context: Context, *, died: str, **options: Any) -> GroupStream:
    stream = open_engine(context, engine="vllm", **options)
    from penstock.nodes.generate.vllm_weights import LinkedWeights

    loads, loaded = LinkedWeights.receive_weights, list[int]()

    def receive(self: LinkedWeights, info: Any) -> None:
        loaded.append(len(info.tensors))
        if len(loaded) == 3 and not Path(died).exists():
            half = dict(islice(info.tensors.items(), len(info.tensors) // 2))
            loads(self, replace(info, tensors=half))
            Path(died).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        loads(self, info)

    setattr(LinkedWeights, "receive_weights", receive)  # noqa: B010
    return stream


@node(pool="generator", init=open_dying)
def dying_generate(
    stream: GroupStream, prompts: Prompts, behaviour: Weights, *, samples: int = 8, died: str
) -> tuple[GroupStream, Rollouts, Metrics]:
    raise NotImplementedError("workers drive the engine itself")


@program
def dies_in_a_swap(policy: Policy, prompts: Prompts, *, died: str, lag: int = 1, lr: float = 1e-3) -> Policy:
    rollouts = dying_generate(prompts, broadcast(policy, lag=lag), samples=8, died=died)
    return aipo_update(policy, rollouts, group_advantage(score(rollouts, by=math_answer)), lr=lr)


def open_wrong(context: Context, **options: Any) -> GroupStream:
    stream = open_engine(context, engine="vllm", **options)
    from penstock.nodes.generate.vllm_weights import LinkedWeights

    loads = LinkedWeights.receive_weights

    def receive(self: LinkedWeights, info: Any) -> None:
        wrong = {name: tensor + 0.5 * ("layers.1.mlp.down_proj" in name) for name, tensor in info.tensors.items()}
        loads(self, replace(info, tensors=wrong))

    setattr(LinkedWeights, "receive_weights", receive)  # noqa: B010
    return stream


@node(pool="generator", init=open_wrong)
def wrong_generate(
    stream: GroupStream, prompts: Prompts, behaviour: Weights, *, samples: int = 8
) -> tuple[GroupStream, Rollouts, Metrics]:
    raise NotImplementedError("workers drive the engine itself")


@program
def loads_wrong_weights(policy: Policy, prompts: Prompts, *, lag: int = 1, lr: float = 1e-3) -> Policy:
    rollouts = wrong_generate(prompts, broadcast(policy, lag=lag), samples=8)
    return aipo_update(policy, rollouts, group_advantage(score(rollouts, by=math_answer)), lr=lr)

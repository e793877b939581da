from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from penstock.graph import Context, Policy, Prompts, Rewards, Rollouts, broadcast, node, program
from penstock.nodes.advantage import group_advantage
from penstock.nodes.generate import generate
from penstock.nodes.learn.update import aipo_update


def ask(texts: Sequence[str]) -> list[float]:
    """In earnest this would ask a server, with a deadline."""
    return [float(len(text) % 2) for text in texts]


class Judge:
    def __init__(self, at_once: int) -> None:
        self.pool = ThreadPoolExecutor(at_once)
        self.asked: dict[Future[list[float]], Any] = {}

    def submit(self, tag: Any, inputs: Mapping[str, Any]) -> None:
        self.asked[self.pool.submit(ask, inputs["rollouts"].texts)] = tag

    def step(self) -> Sequence[tuple[Any, Rewards]]:
        done, _ = wait(self.asked, timeout=0.01, return_when=FIRST_COMPLETED)
        return [(self.asked.pop(future), Rewards(torch.tensor(future.result()))) for future in done]

    def busy(self) -> bool:
        return bool(self.asked)

    def reset(self) -> None:
        self.asked.clear()


def make_judge(context: Context, *, at_once: int = 8) -> Judge:
    return Judge(at_once)


@node(pool="scorer", init=make_judge)
def judged(judge: Judge, rollouts: Rollouts, *, at_once: int = 8) -> tuple[Judge, Rewards]:
    """What a direct call does: one group, waited for."""
    judge.submit(0, {"rollouts": rollouts})
    while True:
        for _, rewards in judge.step():
            return judge, rewards


@program
def with_judge(policy: Policy, prompts: Prompts, *, samples: int = 4, lag: int = 1) -> Policy:
    """AIPO with a judge that answers several groups at once."""
    rollouts = generate(prompts, broadcast(policy, lag=lag), samples=samples)
    return aipo_update(policy, rollouts, group_advantage(judged(rollouts)))

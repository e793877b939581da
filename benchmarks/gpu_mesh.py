"""A trainer over ranks of one card, which say that they are on hosts of their own: the phase `mesh` of `gpu.py`.

    python gpu_mesh.py RANK COUNT MESH FOLDER DEVICE [beside]     # MESH as pp=2,tp=1

Each rank makes two updates of a small model by NCCL (gloo on a CPU), in micro-batches enough that stages are ahead of
each other; a schedule that needs buffers would not end. The first one prints, as JSON, the loss and the gradient's norm
of each update, of the mesh and of one rank alone, and the seconds of the second update. `beside`: meanwhile the first
one sends weights to the second one over a link of their own, so that two communicators are at work on each rank, in any
order; the `versions` that went over are printed, too.
"""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from penstock.graph.protocols import Axes
from penstock.graph.types import Advantages, Context, Rollouts
from penstock.nodes.learn.update import aipo_update
from penstock.nodes.model import CausalLM, ModelConfig
from penstock.nodes.policy import LanguagePolicy
from penstock.nodes.tokenizer import byte_tokenizer
from penstock.runtime.cluster.endpoints import LOOPBACK
from penstock.runtime.tensor.buffers import allocate
from penstock.runtime.tensor.layout import Layout
from penstock.runtime.tensor.link import ReplicaLink
from penstock.runtime.tensor.process_group import open_world, prepare_nccl
from penstock.runtime.tensor.reshard import reshard
from penstock.runtime.tensor.streams import SideStream

ROWS, LENGTH, PROMPT, DEADLINE_S = 12, 64, 8, 40
CONFIG = ModelConfig(byte_tokenizer().vocab_size, 128, 256, 4, 8, 4, 16)


def policy(device: str, mesh: Axes, rank: int) -> LanguagePolicy:
    model = CausalLM(CONFIG, torch.float32, device)
    model.init_weights(1)
    context = Context(node="policy", updates=10, device=device, mesh=mesh, rank=rank)
    return LanguagePolicy(model, byte_tokenizer(), context)


def rollouts() -> Rollouts:
    generator = torch.Generator().manual_seed(0)
    made = torch.ones(ROWS, LENGTH - PROMPT)
    return Rollouts(
        ordinals=tuple(range(ROWS)),
        prompts=("",) * ROWS,
        answers=("",) * ROWS,
        texts=("",) * ROWS,
        tokens_NS=torch.randint(256, (ROWS, LENGTH), generator=generator),
        prompt_lengths_N=torch.full((ROWS,), PROMPT),
        response_lengths_N=torch.full((ROWS,), LENGTH - PROMPT),
        logprobs_NT=-5.6 * made,
        versions_NT=0 * made.long(),
        finished_N=torch.ones(ROWS, dtype=torch.bool),
    )


def learnt(learner: LanguagePolicy) -> tuple[list[dict[str, float]], float]:
    """Loss and norm of each update, and the seconds of the last one."""
    found: list[dict[str, float]] = []
    for _ in range(2):
        began = perf_counter()
        advantage = Advantages(torch.linspace(-1, 1, ROWS))
        metrics: Any = aipo_update.fn(learner, rollouts(), advantage, lr=1e-3, micro_tokens=2 * LENGTH)[1]
        found.append({name: round(metrics[name], 6) for name in ("loss", "grad_norm")})
        seconds = perf_counter() - began
    return found, seconds


def synced(rank: int, folder: str, device: str, over: Event) -> int:
    """Send, or receive, version after version of some weights until the sender's updates are `over`; how many."""
    layout = Layout.whole([(f"t{number}", (1024, 1024), "float32") for number in range(64 if device != "cpu" else 2)])
    parts, plan, store = allocate(layout, 0, device), reshard(layout, layout), FileStore(f"{folder}/beside")
    kind: Any = "messages" if device == "cpu" else "nccl"
    link = ReplicaLink("weights", store, timeout=DEADLINE_S, transport=kind)
    transport = link.open("destination" if rank else "source", device=device)
    version, last = 0, False
    with SideStream(device).apart():
        while not last:
            version += 1
            if rank:
                transport.receive(version, plan.receives(0), parts)
                last = store.check([f"last {version}"])
            else:
                if last := over.is_set():
                    store.set(f"last {version}", "")
                transport.send(version, plan.sends(0), parts)
    return version


def main() -> None:
    words = sys.argv[1:]
    rank, count, (mesh, folder, device, *beside) = int(words[0]), int(words[1]), words[2:]
    axes = tuple((name, int(size)) for name, _, size in (axis.partition("=") for axis in mesh.split(",")))
    torch.set_num_threads(1)
    if device != "cpu":
        os.environ.update(NCCL_HOSTID=f"penstock-{rank}", NCCL_IB_DISABLE="1")
        prepare_nccl(LOOPBACK, beside=bool(beside))
        torch.cuda.set_device(0)
    names = [f"rank {number}" for number in range(count)]
    open_world(FileStore(f"{folder}/ranks", count), names, rank, timeout=DEADLINE_S, device=device)
    over, found = Event(), dict[str, Any]()
    if beside:
        learnt(policy(device, axes, rank))  # as in a run, where the first update comes before the second version
    with ThreadPoolExecutor(1) as thread:
        versions = thread.submit(synced, rank, folder, device, over) if beside else None
        ours, seconds = learnt(policy(device, axes, rank))
        over.set()
        found |= {"versions": versions.result()} if versions else {}
    if rank == 0:
        one_rank = learnt(policy(device, (), 0))[0]
        print(json.dumps({"updates": ours, "one_rank": one_rank, "update_s": seconds, **found}))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # threads of NCCL must not hold up the end


if __name__ == "__main__":
    main()

"""A trainer over ranks of one card, which claim to be on different hosts: the phase `mesh` of `gpu.py`.

    python gpu_mesh.py RANK COUNT MESH FOLDER DEVICE [beside]     # MESH as pp=2,tp=1

Each rank makes two updates of a small model by NCCL (gloo on a CPU), with enough micro-batches that stages run ahead of
each other; a schedule that relied on buffered sends would deadlock. Rank 0 prints, as JSON, the loss and the gradient's
norm of each update, for the mesh and for one rank alone, and the seconds of the second update. With `beside`, rank 0
meanwhile sends weights to rank 1 over a separate link, so that two communicators are active on each rank, in any order;
the number of `versions` that were sent is printed, too.
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

from penstock.graph.context import Context
from penstock.graph.protocols import Axes
from penstock.graph.types import Advantages, Rollouts
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
    """Make two updates; return the loss and the gradient norm of each, and the seconds of the last one."""
    found: list[dict[str, float]] = []
    for _ in range(2):
        began = perf_counter()
        advantage = Advantages(torch.linspace(-1, 1, ROWS))
        metrics: Any = aipo_update.fn(learner, rollouts(), advantage, lr=1e-3, micro_tokens=2 * LENGTH)[1]
        found.append({name: round(metrics[name], 6) for name in ("loss", "grad_norm")})
        seconds = perf_counter() - began
    return found, seconds


def synced(rank: int, folder: str, device: str, over: Event) -> int:
    """Send or receive versions of some weights until the sender's updates are `over`; return how many there were."""
    layout = Layout.whole([(f"t{number}", (1024, 1024), "float32") for number in range(64 if device != "cpu" else 2)])
    parts, plan, store = allocate(layout, 0, device), reshard(layout, layout), FileStore(f"{folder}/beside")
    kind: Any = "messages" if device == "cpu" else "nccl"
    link = ReplicaLink("weights", store, timeout=DEADLINE_S, transport=kind)
    transport = link.open("destination" if rank else "source", device=device)
    version, last = 0, False
    with SideStream(device).detached():
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
        learnt(policy(device, axes, rank))  # as in a run, in which the first update precedes the second version
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
    os._exit(0)  # threads of NCCL must not delay the exit


if __name__ == "__main__":
    main()

"""`python -m penstock.nodes.calibrate DEVICE CORES`: measure, and print what was found as one line of JSON.

On a CPU three times: with all cores and nothing beside, as pools have it that take turns; with the cores that a
generator has beside a trainer, the others busy; and with both at once, which have more threads than there are cores.
For itself it starts `--burn` (keep a core busy) and `--answer` (the other end of a link).
"""

import json
import select
import sys
import time
from typing import Any

import torch

from penstock.nodes.calibrate import memory, passes, products
from penstock.nodes.calibrate.clock import busy

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
ROWS, TRAIN_ROWS = [16, 64, 256, 1024], [512, 2048]
WIDTHS = [128, 256, 512, 1024]
CUDA_WIDTHS = [1024, 2048, 4096, 8192]


def main() -> None:
    if sys.argv[1] == "--burn":
        burn()
    elif sys.argv[1] == "--answer":
        memory.answer(sys.argv[2])
    else:
        device, cores = sys.argv[1], int(sys.argv[2])
        print(json.dumps(cpu(cores) if device == "cpu" else cuda(device)))


def cpu(cores: int) -> dict[str, Any]:
    """Rest: the cores that a generator has beside a trainer, as the default plan shares them out."""
    began, rest = time.monotonic(), cores - max(1, cores // 2) or 1
    found: dict[str, Any] = {"cores": cores, "rest": rest, "torch": torch.__version__}
    torch.set_num_threads(cores)
    found |= {"memory": memory.bandwidths("cpu"), "launch_us": memory.launch_us("cpu"), "links": memory.links()}
    found["turns"] = {name: _forward(name, cores) for name in DTYPES}
    found["training"] = {name: _training(name, cores) for name in DTYPES}
    with busy(cores - rest):
        torch.set_num_threads(rest)
        found["beside"] = {name: _forward(name, rest) for name in DTYPES}
        found["memory_beside"] = memory.bandwidths("cpu")
    found["crowded"] = _crowded(cores, rest)
    found["seconds"] = time.monotonic() - began
    return found


def _crowded(cores: int, rest: int) -> dict[str, float]:
    """How many times longer a trainer's and a generator's work takes while the other one has all of its threads at it,
    too, which are more than there are cores."""
    trains, decodes = passes.TRAINS[-2], passes.DECODES[1]

    def training() -> float:
        torch.set_num_threads(cores)
        return float(passes.training_step(trains, "float32", "cpu", cores, least=1.5)["seconds"])

    def decoding() -> float:
        torch.set_num_threads(rest)
        steps = passes.decode_steps(decodes, "float32", "cpu", rest)["steps"]
        return float(sum(seconds for _, seconds in steps))

    alone = training()
    with busy(rest):
        trainer = training() / alone
    with busy(cores - rest):
        beside = decoding()
    with busy(cores):
        return {"trainer": max(1.0, trainer), "generator": max(1.0, decoding() / beside)}


def cuda(device: str) -> dict[str, Any]:
    """One GPU. Its other links are those of its data sheet."""
    began = time.monotonic()
    torch.cuda.set_device(device)
    found: dict[str, Any] = {"memory": memory.bandwidths(device), "launch_us": memory.launch_us(device)}
    properties = torch.cuda.get_device_properties(device)
    found |= {"name": properties.name, "memory_gib": properties.total_memory / 2**30, "torch": torch.__version__}
    found["products"] = {
        name: products.forward_rates(getattr(torch, dtype), [16, 1024, 8192], CUDA_WIDTHS, device)
        for name, dtype in DTYPES.items()
    }
    found["host_gb_s"] = memory.host_gb_s(device)
    found["seconds"] = time.monotonic() - began
    return found


def _forward(name: str, threads: int) -> dict[str, Any]:
    dtype = DTYPES[name]
    return {
        "products": products.forward_rates(getattr(torch, dtype), ROWS, WIDTHS, "cpu"),
        "decodes": [passes.decode_steps(reference, dtype, "cpu", threads) for reference in passes.DECODES],
    }


def _training(name: str, threads: int) -> dict[str, Any]:
    dtype = DTYPES[name]
    return {
        "products": products.training_rates(getattr(torch, dtype), TRAIN_ROWS, WIDTHS, threads),
        "steps": [passes.training_step(reference, dtype, "cpu", threads) for reference in passes.TRAINS],
        "optimizer": [passes.optimizer_step(reference, dtype, "cpu", threads) for reference in passes.OPTIMIZED],
    }


def burn() -> None:
    """A trainer's lane, for ever; the one who asked for it ends it. With that one's end its input ends, and this."""
    torch.set_num_threads(1)
    reference = passes.TRAINS[0]
    work = passes.training_work(passes.trainer(reference, "float32", "cpu", 1), reference, 1)
    print("busy", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        work()


if __name__ == "__main__":
    main()

"""Rates of this machine's memory, links and GPUs, for `penstock doctor --measure`.

`installed` says what there is, `cpu` and `cuda` measure. The second process of the link measurements is
`python -m penstock.nodes.calibrate FOLDER`; both rendezvous in the folder.

The matrix products on a GPU are those of a decoder: square weights of many layers in turn, so that caches keep as much
of them as in a decoder. The engine steps are those of decoders so narrow that launching their kernels takes longer than
running them.

Shapes: R rows, W width.
"""

import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from penstock.host import module_command
from penstock.nodes.model.kernels import linear

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Shapes of the products on a GPU.
ROWS, WIDTHS = (16, 1024, 8192), (1024, 2048, 4096, 8192)
# Different weights of a product, used in turn: 7 for each of 8 layers.
WEIGHTS = 56
# Most bytes of the weights of one shape, more than a cache holds, and most operations of one call: with many rows
# fewer weights suffice, since reading them is hidden.
MOST_BYTES, MOST_FLOPS = 128 << 20, 8e9
# The least total time of the rounds of one measurement, so that the clock's resolution does not matter.
LEAST_S = 0.03
# Bytes of a tensor that fits in no cache, and of one that fits in the nearest caches.
LARGE, SMALL = 256 << 20, 256 << 10
DEADLINE = timedelta(seconds=30)
# The decoders whose steps are measured. The prompt is as long as in the cost model's count of operations.
STEP_LAYERS, STEP_ROWS, STEP_PROMPT = (2, 18), (16, 256), 100
WARM_STEPS, STEPS = 3, 20


def installed() -> dict[str, Any]:
    """What `penstock doctor` asks of torch, its threads and its GPUs."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [torch.cuda.get_device_properties(i) for i in range(count)]
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "gloo": torch.distributed.is_gloo_available(),
        "triton": triton_lacks(),
        "gpus": [[gpu.name, gpu.total_memory / 2**30, gpu.major, gpu.minor] for gpu in gpus],
    }


def triton_lacks() -> str:
    """Return what Triton lacks on this machine to make kernels for a GPU; "" if nothing. It compiles the launcher of a
    kernel as an extension module of Python."""
    if find_spec("triton") is None:
        return "triton"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "a C compiler"
    scheme = sysconfig.get_default_scheme()
    # Triton does not look at the place of Debian's own scheme.
    header = Path(sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme), "Python.h")
    return "" if header.is_file() else str(header)


def cpu(threads: int) -> dict[str, Any]:
    """Measure the host: its memory, read by this many threads, and its links between two processes."""
    began = time.monotonic()
    torch.set_num_threads(threads)
    found = {"memory": bandwidths("cpu"), "launch_us": launch_us("cpu"), "links": links()}
    return {**found, "torch": torch.__version__, "seconds": time.monotonic() - began}


def cuda(device: str) -> dict[str, Any]:
    """Measure one GPU. Its other links are those of its data sheet."""
    began = time.monotonic()
    torch.cuda.set_device(device)
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "memory_gib": properties.total_memory / 2**30,
        "capability": (properties.major, properties.minor),
        "memory": bandwidths(device),
        "launch_us": launch_us(device),
        "host_gb_s": host_gb_s(device),
        "products": {name: forward_rates(dtype, device) for name, dtype in DTYPES.items()},
        "steps": decoding_steps(device),
        "torch": torch.__version__,
        "seconds": time.monotonic() - began,
    }


def forward_rates(dtype: torch.dtype, device: str) -> list[tuple[int, int, float]]:
    """(rows, width, FLOP/s) of products of each shape."""
    found = []
    for width, rows in product(WIDTHS, ROWS):
        count = max(2, min(WEIGHTS, MOST_BYTES // (width**2 * dtype.itemsize), int(MOST_FLOPS / (2 * rows * width**2))))
        weights = [torch.randn(width, width, device=device).mul_(width**-0.5).to(dtype) for _ in range(count)]
        x_RW = torch.randn(rows, width, device=device).to(dtype)

        def work(x_RW: Tensor = x_RW, weights: list[Tensor] = weights) -> None:
            for weight in weights:
                linear(x_RW, weight)

        with torch.inference_mode():
            found.append((rows, width, 2.0 * rows * width**2 * count / seconds(work)))
    return found


def decoding_steps(
    device: str, layers: Sequence[int] = STEP_LAYERS, rows: Sequence[int] = STEP_ROWS
) -> list[tuple[int, int, float]]:
    """(layers, rows, seconds) of the median step of a run's engine, for narrow decoders of these numbers of layers and
    of rows in work, whose operations are launched one by one."""
    # Half a second of imports, which `installed` does not need.
    from penstock.graph.context import Context
    from penstock.graph.types import Prompts, Weights
    from penstock.nodes.generate import make_engine
    from penstock.nodes.model import CausalLM, ModelConfig
    from penstock.nodes.tokenizer import byte_tokenizer

    found, width, samples = [], 64, 16
    for depth, count in product(layers, rows):
        config = ModelConfig(4096, width, 2 * width, depth, 4, 4, width // 4, 256)
        model = CausalLM(config, torch.bfloat16)
        model.init_weights(0)
        weights = Weights(0, {name: part.to(device) for name, part in model.state_dict().items()})
        with tempfile.TemporaryDirectory() as folder:
            facts = {"architectures": ["LlamaForCausalLM"], **config.to_json("bfloat16")}
            Path(folder, "config.json").write_text(json.dumps(facts))
            byte_tokenizer().save(folder)
            context = Context("generate", model=folder, dtype="bfloat16", device=device, slots=count)
            engine = make_engine(replace(context, max_tokens=128, max_prompt=STEP_PROMPT), samples=samples)
            engine.replays = False
        for group in range(count // samples):
            prompts = Prompts((group,), ("a" * (STEP_PROMPT - 4),), ("",))
            engine.submit(group, {"prompts": prompts, "behaviour": weights})
        # All begin in the same step, since their prompts are the same; one of them may also end in it.
        while not engine.slots.sampling.any():
            engine.step()
        taken = []
        for _ in range(WARM_STEPS + STEPS):
            began = time.perf_counter()
            engine.step()  # waits for the tokens, and so for the device
            taken.append(time.perf_counter() - began)
        found.append((depth, count, statistics.median(taken[WARM_STEPS:])))
    return found


def bandwidths(device: str) -> dict[str, float]:
    """GB/s: `read` by a sum over a large tensor, `copy` read and written by a copy of it, `cached` by a copy of a small
    one."""
    large = torch.ones(LARGE // 4, device=device)
    other, small = torch.empty_like(large), torch.ones(SMALL // 4, device=device)
    near = torch.empty_like(small)
    found = {
        "read": LARGE / seconds(large.sum),
        "copy": 2 * LARGE / seconds(lambda: other.copy_(large)),
        "cached": 2 * SMALL / seconds(lambda: near.copy_(small)),
    }
    return {name: value / 1e9 for name, value in found.items()}


def launch_us(device: str) -> float:
    """Microseconds of an operation on a few elements, with its call from Python."""
    a, b = (torch.ones(16, device=device) for _ in range(2))

    def work() -> None:
        for _ in range(100):
            torch.add(a, b)

    with torch.inference_mode():
        return seconds(work) / 100 * 1e6


def host_gb_s(device: str) -> float:
    """GB/s from a GPU to its host's pinned memory, or back."""
    there = torch.empty(LARGE // 4, device=device)
    here = torch.empty(LARGE // 4, pin_memory=True)
    return LARGE / seconds(lambda: there.copy_(here, non_blocking=True)) / 1e9


def links() -> dict[str, float]:
    """GB/s and microseconds one way between two processes: over gloo on loopback, and by shared memory."""
    with tempfile.TemporaryDirectory() as folder:
        command = module_command("penstock.nodes.calibrate", folder)
        # A process and no thread: between processes transports differ, and threads would measure the interpreter lock.
        with subprocess.Popen(command) as other:
            try:
                return {**_gloo(Path(folder), 0), **_shared()}
            finally:
                other.kill()


def _gloo(folder: Path, rank: int) -> dict[str, float]:
    from torch._C._distributed_c10d import FileStore, ProcessGroupGloo

    gloo: Any = ProcessGroupGloo  # torch's stubs lack the options
    options = gloo._Options()
    options._devices = [gloo.create_device(interface="lo")]
    options._timeout = DEADLINE
    group = gloo(FileStore(str(folder / "store"), 2), rank, 2, options)
    found = {}
    for name, size, rounds in (("latency", 8, 200), ("gloo", 32 << 20, 6)):
        payload = torch.zeros(size, dtype=torch.uint8)
        began = 0.0
        for number in range(rounds + 2):
            began = time.perf_counter() if number == 2 else began
            _ping(group, payload, rank)
        found[name] = (time.perf_counter() - began) / (2 * rounds)
    return {"gloo_gb_s": (32 << 20) / found["gloo"] / 1e9, "latency_us": found["latency"] * 1e6}


def _ping(group: Any, payload: Tensor, rank: int) -> None:
    """One round trip."""
    for sender in (0, 1):
        work = group.send([payload], 1 - rank, 0) if rank == sender else group.recv([payload], 1 - rank, 0)
        work.wait()


def _shared() -> dict[str, float]:
    """The rate of writing into a shared mapping: the other process reads it without a second copy."""
    path = Path("/dev/shm") / f"penstock-measure-{os.getpid()}-{secrets.token_hex(4)}"
    size = 64 << 20
    try:
        there = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        here = torch.ones(size, dtype=torch.uint8)
        return {"shared_gb_s": size / seconds(lambda: there.copy_(here)) / 1e9}
    finally:
        path.unlink(missing_ok=True)


def seconds(work: Callable[[], object]) -> float:
    """The median over several rounds of the seconds of one call, until a GPU's work is done."""
    timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
    work()  # the first call allocates memory
    return float(timer.blocked_autorange(min_run_time=LEAST_S).median)


if __name__ == "__main__":
    _gloo(Path(sys.argv[1]), 1)

"""The phases of `gpu.py`: `python gpu_phases.py PHASE DEVICE` prints each figure that it finds as a JSON line.

On the CPU everything is tiny, and its figures mean nothing. If a figure cannot be measured, for example because a card
has too little memory for a model, it has the reason in `error`, and the phase continues. Times are medians; GB are 10^9
bytes.

Shapes: N responses, S tokens of a sequence, T tokens of a response.
"""

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from queue import Empty, Queue
from time import perf_counter
from typing import Any

import torch
from gpu_ranks import ONE_B, Generator, Policy, small
from llama import MODELS
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from penstock.graph.context import Context
from penstock.graph.types import Advantages, Rollouts
from penstock.nodes import calibrate
from penstock.nodes.learn.update import aipo_update
from penstock.nodes.model import CausalLM, Lora, ModelConfig, eight_bit, save_model
from penstock.nodes.model.lora import initial
from penstock.nodes.policy import LanguagePolicy
from penstock.nodes.tokenizer import byte_tokenizer
from penstock.runtime.cluster.gpus import GPUS
from penstock.runtime.plan.model_shape import Parallel, shape_of
from penstock.runtime.plan.train_cost import Trainer, attention_flops, trainer_memory
from penstock.runtime.tensor.buffers import allocate
from penstock.runtime.tensor.checkpoint import HostBuffers, save_state
from penstock.runtime.tensor.layout import Layout, Mesh, Region, sharded
from penstock.runtime.tensor.offload import Offload
from penstock.runtime.tensor.quantise import Converter
from penstock.runtime.tensor.weight_sync import WeightPublisher
from penstock.runtime.tensor.wire_format import FORMATS, converted

Figures = dict[str, Any]
ROOT = Path(__file__).resolve().parent.parent
WARM, REPEATS = 2, 9
ANSWER_S, RUN_S = 60.0, 80.0


def smoke(device: str) -> Iterator[Figures]:
    """Check that runs work at all. Ranks are forked from a process that has imported torch, so that a run shows whether
    their CUDA contexts can be created."""
    if device != "cpu":
        card = torch.cuda.get_device_properties(device)
        yield {"card": card.name, "memory_gib": round(card.total_memory / 2**30, 1), "cuda": torch.version.cuda}
        nccl: Any = torch.cuda.nccl
        yield {"nccl": ".".join(map(str, nccl.version())), "capability": [card.major, card.minor]}
    yield {"run aipo": penstock_run([f"--device={device}", *SMALL, "--updates=3", "--model=new"])[0]}
    with tempfile.TemporaryDirectory() as name:
        model = CausalLM(small(ONE_B), torch.float32)
        model.init_weights(0)
        save_model(model, model.state_dict(), name)
        byte_tokenizer().save(name)
        # As a new user would type it: on a card the run is planned.
        yield {"first run": penstock_run([f"--model={name}", "--data=arithmetic", "--batch=4", "--updates=3"])[0]}
    files = ["runtime/tensor/test_links.py", "runtime/tensor/test_checkpoint.py"]
    files += ["nodes/test_gpu.py"] if device != "cpu" else []  # the others run there anyway
    chosen = "cuda or offload or gpu" if device != "cpu" else "cuda"
    command = [sys.executable, "-m", "pytest", "-q", "-k", chosen, *(f"tests/{file}" for file in files)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_S)
    yield {"tests": (done.stdout or done.stderr).strip().splitlines()[-1], "tests_failed": done.returncode != 0}


def decode(device: str) -> Iterator[Figures]:
    """Measure steps of the engine with all slots in use, in bfloat16 with random weights: milliseconds of the median
    step, the kernels that one step launches (on a CPU, operations), and tokens/s over those of a step that only reads
    the weights and the cache (all slots up to the context) at the measured bandwidth, or multiplies at the measured
    rate if that takes longer. Then the first cases with weights of eight bits."""
    bandwidth, flops = rates(device)
    yield {"read_gb_s": bandwidth / 1e9, "bf16_tflops": flops / 1e12}
    models = {"1B": ONE_B, "8B": replace(MODELS["8B"], max_position_embeddings=8192)}
    if device == "cpu":
        models, cases = {"tiny": small(ONE_B)}, [(16, 32)]
    else:
        cases = [(64, 1024), (16, 128), (256, 1024), (256, 128), (64, 3072), (16, 1024), (64, 128), (16, 3072)]
        cases.append((256, 3072))
    for name, config in models.items():
        tensors = Policy(device, config).tensors
        read = sum(t.nbytes for n, t in tensors.items() if "embed_tokens" not in n or config.tie_word_embeddings)
        for slots, context in cases:
            key = f"{name}, {slots} slots, {context} tokens"
            gc.collect()
            try:
                found = decode_steps(device, config, tensors, slots, context)
            except (RuntimeError, ValueError) as error:
                yield {key: {"error": first_line(error)}}
                continue
            cache = slots * context * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
            least = max((read + cache) / bandwidth, slots * read / flops)  # two FLOPs per weight of two bytes
            per_s = slots / found["ms"] * 1e3
            yield {key: {**found, "tokens_per_s": round(per_s), "of_the_roofline": round(per_s * least / slots, 3)}}
        yield from in_eight_bits(device, name, config, tensors, cases[:3])
        del tensors


def in_eight_bits(
    device: str, name: str, config: ModelConfig, tensors: Mapping[str, Tensor], cases: list[tuple[int, int]]
) -> Iterator[Figures]:
    """Measure the same with weights that were sent in fp8, or in int8 on a CPU; and the largest error of a layer's
    product, relative to its largest value."""
    precision, key = "int8" if device == "cpu" else "fp8", next(n for n in tensors if n.endswith("q_proj.weight"))
    layout = Layout.whole(_entries(tensors))
    wire = converted(layout, precision)
    parts = allocate(wire, 0, device)
    Converter(layout, wire, 0).convert(tensors, parts)
    narrow = {each: part.tensor for each, part in parts.items()}
    x = torch.randn(64, tensors[key].shape[1], device=device).bfloat16()
    exact = x.float() @ tensors[key].float().t()
    made = eight_bit.product(
        x, eight_bit.QuantisedRows.of(x, narrow[key].dtype), narrow[key], narrow[f"{key}.scale"], None
    )
    yield {f"{name}, {precision}: a product": float((made.float() - exact).abs().max() / exact.abs().max())}
    for slots, context in cases:
        gc.collect()
        try:
            found = decode_steps(device, config, narrow, slots, context, precision)
        except (RuntimeError, ValueError) as error:
            found = {"error": first_line(error)}
        yield {f"{name}, {precision}, {slots} slots, {context} tokens": found}


def decode_steps(
    device: str, config: ModelConfig, tensors: Mapping[str, Tensor], slots: int, context: int, precision: str = ""
) -> dict[str, Any]:
    """Measure steps after a prompt of `context` tokens in each slot. Raises ValueError if the cache does not fit."""
    with tempfile.TemporaryDirectory() as folder:
        engine = Generator(Path(folder), config, device, slots, context, precision)
    engine.fill(tensors)
    for _ in range(WARM):
        engine.step()
    seconds = [engine.step() for _ in range(20 if device != "cpu" else 3)]
    kind = ProfilerActivity.CPU if device == "cpu" else ProfilerActivity.CUDA
    with profile(activities=[kind], acc_events=True) as seen:
        engine.step()
    # The profiler also has the launching calls, as events of the host.
    kernels = sum(event.count for event in seen.key_averages() if event.device_type.name == kind.name)
    found = {"ms": 1e3 * statistics.median(seconds), "kernels": kernels}
    if device != "cpu":
        found["peak_gb"] = round(torch.cuda.max_memory_allocated(device) / 1e9, 2)
        torch.cuda.reset_peak_memory_stats(device)
    return found


def rates(device: str) -> tuple[float, float]:
    """Measure the bytes per second that a sum reads, and the FLOP/s of a large product in bfloat16."""
    width = 256 if device == "cpu" else 8192
    a = torch.randn(width, width, device=device).bfloat16()
    return calibrate.bandwidths(device)["read"] * 1e9, 2.0 * width**3 / calibrate.seconds(lambda: a @ a)


def overlap(device: str) -> Iterator[Figures]:
    """Send weights of the 1B model from one process to another on the card, by each method: alone, and while the sender
    trains and the receiver decodes; also measure their steps alone and during a sync."""
    for method in ("shm off",) if device == "cpu" else ("cuda_ipc off", "cuda_ipc full", "messages off"):
        yield {method: synced(device, method, beside=True)}


def nccl(device: str) -> Iterator[Figures]:
    """Sync by NCCL. It refuses two ranks of one host on one card, so they claim to be on two hosts (`NCCL_HOSTID`):
    unsupported and slow, but the same code as between two cards."""
    if device == "cpu":
        yield {"messages full": synced(device, "messages full")}
        return
    for method in ("nccl off", "nccl full", "nccl full fp8"):
        yield {method: synced(device, method, repeats=3)}


def mesh(device: str) -> Iterator[Figures]:
    """Train over two ranks of one card, which also claim to be on two hosts; in one case, one of them meanwhile sends
    weights to the other."""
    for axes in ("pp=2", "fsdp=2 beside") if device == "cpu" else ("fsdp=2 beside", "pp=2", "tp=2", "fsdp=2"):
        yield {axes: trained(device, *axes.split())}


def trained(device: str, mesh: str, *beside: str) -> Figures:
    """Compare two updates of a trainer over two ranks of `gpu_mesh.py` with those of one rank: whether they end, how
    far they are apart (`off`), and how long the second one takes."""
    with tempfile.TemporaryDirectory() as folder:
        script = str(Path(__file__).with_name("gpu_mesh.py"))
        commands = [[sys.executable, script, str(rank), "2", mesh, folder, device, *beside] for rank in range(2)]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        ranks = [subprocess.Popen(command, **pipes) for command in commands]
        try:
            said = [rank.communicate(timeout=ANSWER_S) for rank in ranks]
        except subprocess.TimeoutExpired:
            return {"error": f"{mesh}: no end after {ANSWER_S:g} s"}
        finally:
            for rank in ranks:
                rank.kill()
    for number, (rank, (_, errors)) in enumerate(zip(ranks, said, strict=True)):
        if rank.returncode:
            return {"error": f"{mesh}: rank {number}: {errors.strip()[-300:]}"}
    found: Figures = json.loads(said[0][0].splitlines()[-1])
    pairs = zip(found["updates"], found["one_rank"], strict=True)
    off = max(abs(ours[name] - one[name]) / max(1e-3, abs(one[name])) for ours, one in pairs for name in one)
    return {**found, "off": round(off, 6)}


class Rank:
    """One of the two processes of `gpu_ranks.py`, with its answers."""

    def __init__(self, side: str, folder: Path, device: str) -> None:
        script = str(Path(__file__).with_name("gpu_ranks.py"))
        command = [sys.executable, script, side, str(folder), device]
        self.side = side
        self.process: Any = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.lines: Queue[str] = Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def tell(self, do: str, **order: Any) -> None:
        self.process.stdin.write(json.dumps({"do": do, **order}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Figures:
        """Return the next answer. Raises RuntimeError for an error, and if the process has ended or does not answer in
        time."""
        try:
            line = self.lines.get(timeout=ANSWER_S)
        except Empty:
            raise RuntimeError(f"{self.side}: no answer for {ANSWER_S:g} s") from None
        if not line.startswith("{"):
            raise RuntimeError(f"{self.side}: ended with {line!r}")
        found: Figures = json.loads(line)
        if "error" in found:
            raise RuntimeError(f"{self.side}: {found['error']}")
        return found

    def ask(self, do: str, **order: Any) -> Figures:
        self.tell(do, **order)
        return self.answer()

    def end(self) -> None:
        """Close its input, so that it frees its memory and exits; kill it if it does not."""
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(20)

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(f"status {self.process.wait()}")


def synced(device: str, method: str, beside: bool = False, repeats: int = REPEATS) -> Figures:
    """Measure syncs in two new processes, so that nothing that another method left on the card affects them."""
    with tempfile.TemporaryDirectory() as name:
        ranks = [Rank(side, Path(name), device) for side in ("source", "destination")]
        try:
            for rank in ranks:
                rank.answer()
            source, destination = ranks
            found: Figures = {"alone": syncs(method, source, destination, range(WARM + repeats))}
            if beside:
                found["train_step_ms"] = source.ask("work", steps=3)["ms"]
                found["decode_step_ms"] = destination.ask("work", steps=10)["ms"]
                more = range(WARM + repeats, 2 * WARM + repeats + 4)
                found["beside"] = syncs(method, source, destination, more, beside=True)
            return found
        except RuntimeError as error:
            return {"error": str(error)}
        finally:
            for rank in ranks:
                rank.end()


def syncs(method: str, source: Rank, destination: Rank, versions: range, beside: bool = False) -> Figures:
    """Run syncs; return medians. `ms` is from the last start to the last end, after the snapshot (`publish_ms`)."""
    times: dict[str, list[float]] = {}
    for version in versions:
        published = source.ask("publish", method=method, version=version)
        destination.tell("move", method=method, version=version, facts=published["facts"], beside=beside)
        source.tell("move", method=method, version=version, beside=beside)
        sent, arrived = source.answer(), destination.answer()
        if version < versions.start + WARM:
            continue
        span = max(sent["end"], arrived["end"]) - max(sent["start"], arrived["start"])
        each = {"ms": 1e3 * span, "publish_ms": 1e3 * published["seconds"], "wire_ms": 1e3 * arrived["wire"]}
        each |= {"prove_ms": 1e3 * arrived["prove"]}
        if beside:
            each |= {"train_step_ms": sent["step_ms"], "decode_step_ms": arrived["step_ms"]}
        for key, value in each.items():
            times.setdefault(key, []).append(value)
    middle = {name: round(statistics.median(own), 3) for name, own in times.items()}
    rate = sent["bytes"] / middle["ms"] / 1e6
    return {"bytes": sent["bytes"], **middle, "gb_per_s": round(rate, 2), "by": sent["by"]}


def train(device: str) -> Iterator[Figures]:
    """Measure updates by AIPO in bfloat16, of all weights with float32 masters or of adapters, on packed sequences of
    one length: tokens/s; MFU, from the FLOPs that an update needs without recomputation and the measured rate of a
    large product; and the card's peak memory over that of the plan, both without the memory that CUDA needs itself."""
    flops = rates(device)[1]
    models = {"1B": ONE_B, "8B, 8 of 32 layers": replace(MODELS["8B"], num_hidden_layers=8)}
    cases = [
        ("layer", 16384, 28, "device", 0), ("none", 16384, 28, "device", 0), ("layer", 32768, 28, "device", 0),
        ("layer", 16384, 28, "host", 0), ("layer", 16384, 22, "device", 0), ("none", 8192, 28, "device", 0),
        ("layer", 16384, 28, "device", 16),
    ]  # fmt: skip
    rows, length = 32, 2048
    if device == "cpu":
        cases = [("layer", 128, 16, "host", 0), ("none", 128, 16, "device", 0), ("layer", 128, 16, "device", 4)]
        models, rows, length = {"tiny": small(ONE_B)}, 4, 64
    for name, config in models.items():
        shape = shape_of(config.to_json("bfloat16"), name)
        for recompute, micro_tokens, bits, where, lora in cases:
            key = f"{name}, recompute {recompute}, {micro_tokens} tokens, 2^{bits} logits, moments on the {where}"
            key += f", adapters of rank {lora}" if lora else ""
            options = {"recompute": recompute, "micro_tokens": micro_tokens, "logit_elements": 1 << bits}
            options |= {"optimizer_state": where, "lora": lora}
            gc.collect()  # a reference cycle may hold a model whose memory the next one needs
            try:
                seconds, peak = updates_s(device, config, rows, length, options)
            except (RuntimeError, ValueError) as error:
                yield {key: {"error": first_line(error)}}
                continue
            tokens = rows * length
            # Frozen weights have no gradient; adapters have three products of 2 FLOPs per weight.
            own = shape.with_lora(lora)
            learns = 6.0 * shape.layers * own.adapted() if lora else 2.0 * shape.active_parameters
            needed = (4.0 * shape.active_parameters + learns) * tokens
            needed += 3.0 * attention_flops(shape, rows * length**2)
            mesh, again = Parallel(), float(recompute == "layer")
            trainer = Trainer(
                own, GPUS["H100"], mesh, micro_tokens=micro_tokens, recompute=again,
                logit_elements=1 << bits, host_state=where == "host",
            )  # fmt: skip
            planned = trainer_memory(trainer).used
            found = {"update_s": seconds, "tokens_per_s": tokens / seconds, "mfu": needed / seconds / flops}
            found |= {"planned_gb": planned / 1e9, "peak_gb": peak / 1e9, "peak_over_plan": peak / planned}
            yield {key: {name: round(value, 4) for name, value in found.items()}}


def updates_s(
    device: str, config: ModelConfig, rows: int, length: int, options: Mapping[str, Any]
) -> tuple[float, float]:
    """Return the seconds of an update, and its peak bytes on the card, 0 for a CPU."""
    torch.manual_seed(0)
    # With adapters, the base is loaded in the dtype in which it computes.
    lora = Lora(options["lora"], 32.0) if options["lora"] else None
    model = CausalLM(config, torch.bfloat16 if lora else torch.float32, device, lora=lora)
    for name, parameter in model.own_parameters().items() if lora else ():
        parameter.data.copy_(initial(name, parameter.shape, 0))
    for name, tensor in Policy(device, config).tensors.items():
        model.get_parameter(name).data.copy_(tensor)
    policy = LanguagePolicy(model, byte_tokenizer(), Context(node="policy", dtype="bfloat16", device=device, **options))
    prompt = length // 16
    tokens_NS = torch.randint(256, (rows, length))
    made = torch.ones(rows, length - prompt)
    rollouts = Rollouts(
        ordinals=tuple(range(rows)),
        prompts=("",) * rows,
        answers=("",) * rows,
        texts=("",) * rows,
        tokens_NS=tokens_NS,
        prompt_lengths_N=torch.full((rows,), prompt),
        response_lengths_N=torch.full((rows,), length - prompt),
        logprobs_NT=-11.0 * made,
        versions_NT=0 * made.long(),
        finished_N=torch.ones(rows, dtype=torch.bool),
    )
    advantage = Advantages(torch.linspace(-1, 1, rows))
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = []
    for _ in range(3 if device != "cpu" else 2):
        finish(device)
        began = perf_counter()
        aipo_update.fn(policy, rollouts, advantage, lr=1e-6)
        finish(device)
        seconds.append(perf_counter() - began)
    peak = torch.cuda.max_memory_allocated(device) if device != "cpu" else 0
    # The first update allocates memory and selects kernels.
    return statistics.median(seconds[1:]), float(peak)


def state(device: str) -> Iterator[Figures]:
    """Measure GB/s of the 1B model's weights: copied on the card, published for a sync with each proof and wire format,
    moved to the host and back, copied to the host for a checkpoint, and written from there into a file. Also check
    whether the converted parts of two ranks equal the converted whole, and the card's conversion that of the CPU."""
    policy = Policy(device, small(ONE_B) if device == "cpu" else ONE_B)
    nbytes = sum(t.nbytes for t in policy.tensors.values())

    def rate(work: Callable[[], object]) -> float:
        seconds = []
        for _ in range(WARM + REPEATS):
            finish(device)
            began = perf_counter()
            work()
            finish(device)
            seconds.append(perf_counter() - began)
        return round(nbytes / statistics.median(seconds[WARM:]) / 1e9, 2)

    aside = {name: torch.empty_like(t) for name, t in policy.tensors.items()}

    def copy() -> None:
        for name, tensor in policy.tensors.items():
            aside[name].copy_(tensor)

    yield {"bytes": nbytes, "copy": rate(copy)}
    proof: Any
    for proof, wire in [("off", ""), ("sampled", ""), ("full", ""), *(("full", wire) for wire in FORMATS)]:
        publisher = WeightPublisher("policy>generator", policy, device=device, keep=1, proof=proof, wire=wire)
        publish = partial(lambda publisher, versions: publisher.publish(next(versions)), publisher, count())
        yield {f"publish, proof {proof} {wire}".strip(): rate(publish)}
    offload = Offload("weights")

    def there() -> None:
        offload.leave(aside)
        offload.fence()

    def and_back() -> None:
        there()
        offload.come_back()
        offload.fence()

    yield {"to the host and back": rate(and_back)}
    buffers = HostBuffers()
    yield {"aside for a checkpoint": rate(lambda: buffers.copy(policy.tensors))}
    copies = buffers.copy(policy.tensors)
    yield {"the copy has the bits": all(torch.equal(copies[name], t.cpu()) for name, t in policy.tensors.items())}
    yield {"its memory in bytes of the weights": round(buffers.nbytes / nbytes, 2)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.safetensors"
        yield {"into a file": rate(lambda: save_state(path, copies, {}))}
    yield {"conversion": conversion(device)}


def finish(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def conversion(device: str) -> dict[str, dict[str, bool]]:
    """Return, for each wire format, whether two ranks convert their halves of each row to the same bits as the whole
    tensor, and whether the device converts to the same bits as the CPU."""
    generator = torch.Generator(device).manual_seed(2)
    tensors = {
        name: torch.randn(shape, generator=generator, device=device).bfloat16()
        for name, shape in {"gate": (2048, 1024), "down": (1000, 1536)}.items()
    }
    return {
        wire: {
            "parts_are_the_whole": _parts_are_the_whole(wire, tensors, device),
            "as_on_the_cpu": _equal(
                _whole(wire, tensors, device), _whole(wire, {n: t.cpu() for n, t in tensors.items()}, "cpu")
            ),
        }
        for wire in FORMATS
    }


def _entries(tensors: Mapping[str, Tensor]) -> list[tuple[str, tuple[int, ...], str]]:
    return [(name, tuple(t.shape), "bfloat16") for name, t in tensors.items()]


def _whole(wire: str, tensors: Mapping[str, Tensor], device: str) -> dict[str, Tensor]:
    layout = Layout.whole(_entries(tensors))
    out = allocate(converted(layout, wire), 0, device)
    Converter(layout, converted(layout, wire), 0).convert(tensors, out)
    return {name: part.tensor for name, part in out.items()}


def _parts_are_the_whole(wire: str, tensors: Mapping[str, Tensor], device: str) -> bool:
    layout = sharded(_entries(tensors), Mesh((("tp", 2),)), {"": (1, 0)})
    travels, whole = converted(layout, wire), _whole(wire, tensors, device)
    said: list[Tensor] = [torch.empty(0)] * 2
    meeting, same = threading.Barrier(2, timeout=ANSWER_S), [False] * 2

    def convert(rank: int) -> None:
        def agree(maxima: Tensor) -> Tensor:
            said[rank] = maxima
            meeting.wait()
            return torch.maximum(*said)

        own = {t.name: _cut(tensors[t.name], box) for t in layout.tensors for box in t.held_by(rank)}
        parts = allocate(travels, rank, device)
        Converter(layout, travels, rank).convert(own, parts, agree)
        expected = {name: _cut(whole[name], part.region) for name, part in parts.items()}
        same[rank] = _equal({name: part.tensor for name, part in parts.items()}, expected)

    threads = [threading.Thread(target=convert, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return all(same)


def _cut(tensor: Tensor, box: Region) -> Tensor:
    return tensor[box.slices(Region.whole(tensor.shape))]


def _equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """True if all tensors are bit-identical."""
    flat = [{name: t.cpu().contiguous().view(-1).view(torch.uint8) for name, t in each.items()} for each in (a, b)]
    return a.keys() == b.keys() and all(torch.equal(flat[0][name], flat[1][name]) for name in a)


SHOWN = "reward_mean", "loss", "entropy"
RUN, SMALL = ["--updates=6", "--eval-groups=0", "--plain", "--json"], ["--batch=8", "--slots=64"]


def penstock_run(flags: list[str]) -> tuple[Figures, list[float]]:
    """Run aipo; return its figures, and its rewards, losses and entropies by update."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        try:
            summary = penstock("run", "aipo", *RUN, *flags, "--out", str(folder))
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            return {"error": str(error)}, []
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        kept: Figures = {
            key: summary[key] for key in ("status", "wall_s", "updates", "groups", "warnings") if key in summary
        }
        for key in ("sync_s", "generate_tokens_per_s", "train_tokens_per_s", "mismatch"):
            own = [row[key] for row in rows[2:] if row.get(key) is not None]
            kept |= {key: round(statistics.median(own), 6)} if own else {}
        ends = [row["time_s"] for row in rows]
        kept["update_s"] = round(statistics.median(b - a for a, b in pairwise(ends[1:] if len(ends) > 2 else ends)), 4)
        return kept, [row[key] for row in rows for key in SHOWN]


def bits(device: str) -> Iterator[Figures]:
    """Compare runs at lag 0: `unlike` is the largest difference of a run's rewards, losses and entropies from those of
    the first one. 0 means bit-identical; bfloat16, and sums that a card adds in a varying order, are close to it. The
    cost of --deterministic is the difference in `update_s` between the first and the third run."""
    straight = "shm" if device == "cpu" else "cuda_ipc"
    asked = {
        "deterministic": ["--deterministic"],
        "deterministic, again": ["--deterministic"],
        "as it is": [],
        "as it is, again": [],
        straight: [f"--transport={straight}"],
        "messages": ["--transport=messages"],
        "offload": ["--offload=on"],
        "bfloat16": ["--dtype=bfloat16"],
    }
    if device == "cpu":
        tiny = ["--model=new", "--updates=2"]
        asked = {name: [*flags, *tiny] for name, flags in asked.items() if name in ("deterministic", "as it is")}
    else:
        with tempfile.TemporaryDirectory() as name:  # builds the base model, which happens at its first use
            penstock("run", "aipo", "--updates=1", "--eval-groups=0", "--plain", "--json", "--out", f"{name}/run")
    first: list[float] = []
    for name, flags in asked.items():
        found, shown = penstock_run([f"--device={device}", *SMALL, "--lag=0", *flags])
        first = first or shown
        if len(shown) == len(first) > 0:
            found["unlike"] = max(abs(a - b) for a, b in zip(first, shown, strict=True))
        yield {name: found}


def plan(device: str) -> Iterator[Figures]:
    """Measure the card with `doctor --measure`, and compare the seconds of an update of the 1B model that `plan`
    predicts with those of a run of that plan, the median of all but the first two. Responses have the largest length,
    since random weights do not end them."""
    config, tokens = (small(ONE_B), 16) if device == "cpu" else (ONE_B, 128)
    batch, samples, slots = (2, 8, 16) if device == "cpu" else (16, 8, 128)
    with tempfile.TemporaryDirectory() as name:
        folder, cluster = Path(name), "1x1xH100"
        if device != "cpu":
            cluster = str(folder / "this.toml")
            measured = penstock("doctor", "--measure", "--json", "--out", cluster)
            yield {"measured": measured}
        model = CausalLM(config, torch.bfloat16)
        save_model(model, {n: t.cpu() for n, t in Policy(device, config).tensors.items()}, folder / "model")
        byte_tokenizer().save(folder / "model")
        work = [f"--batch={batch}", f"--samples={samples}", f"--max-tokens={tokens}", f"--slots={slots}", "--lag=1"]
        lengths = ["--prompt-tokens=8", f"--lengths={tokens},0", f"--model={folder / 'model'}"]
        file = folder / "plan.json"
        planned = penstock("plan", "aipo", "--json", f"--cluster={cluster}", *work, *lengths, f"--out={file}")
        yield {"planned_s": planned["period_s"], "bound": planned["bound"]}
        # A plan for a card cannot be used on a CPU.
        there = [*work, f"--model={folder / 'model'}", "--dtype=bfloat16"] if device == "cpu" else [f"--plan={file}"]
        found, _ = penstock_run([*there, "--data=arithmetic", "--updates=4"])
        yield {"run": found}
        yield {"planned_over_measured": planned["period_s"] / found["update_s"]}


def penstock(*words: str) -> Figures:
    """Run a command; return its last line, which is JSON. Raises RuntimeError with its output if it fails."""
    command = [sys.executable, "-m", "penstock.runtime.cli.main", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {(done.stderr or done.stdout)[-1500:]}")
    found: Figures = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:300]


PHASES: dict[str, Callable[[str], Iterator[Figures]]] = {
    "smoke": smoke,
    "decode": decode,
    "overlap": overlap,
    "train": train,
    "state": state,
    "bits": bits,
    "plan": plan,
    "nccl": nccl,
    "mesh": mesh,
}


def main() -> None:
    name, device = sys.argv[1:]
    for figures in PHASES[name](device):
        print(json.dumps(figures), flush=True)
    sys.stdout.flush()
    os._exit(0)  # threads of CUDA and NCCL must not delay the exit


if __name__ == "__main__":
    main()

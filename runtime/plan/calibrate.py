"""Host time, fixed seconds and the shares of rates of one kind of GPU, as a finished run's folder tells them. Pure but
for reading the folder.

What a folder identifies, and from what:

- decoding: seconds of each group's firing over the steps of its longest response, by the rows that its replica decoded
  meanwhile. What the cost model's kernels do not explain is time of the host: `step_ms`, and where the rows differ by
  half or more, `row_us`.
- updates: seconds of each against the model's. The shares of matrix products and of attention become those with which
  the model takes as long; where the tokens of updates differ by a third or more, what does not grow with them is
  `stage_s`.
- syncs: what the wire does not explain is `swap_s`.

All else keeps its default. Lengths of single responses are not recorded: a group's longest is the mean longest of the
lengths that the run's metrics speak for. The first quarter of the firings warms everything up, and is left out.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from penstock.runtime.cluster.cluster import Cluster
from penstock.runtime.cluster.gpus import Efficiency, Gpu, HostTime, Precision
from penstock.runtime.cluster.placement import Plan
from penstock.runtime.plan.decode_cost import KERNELS, Generator
from penstock.runtime.plan.model_shape import Parallel, read_shape
from penstock.runtime.plan.roles import Roles, roles_of, with_adapters
from penstock.runtime.plan.sync_cost import sync_cost, traffic
from penstock.runtime.plan.train_cost import PackedBatch, Trainer, packed
from penstock.runtime.plan.workload import IntArray, halved, of_run
from penstock.runtime.record.errors import RecordError
from penstock.runtime.record.folder import RunFolder
from penstock.runtime.record.typed_json import ConfigFile
from penstock.runtime.report.follow import NS
from penstock.runtime.report.run_history import StageHistory, read_facts
from penstock.runtime.report.what_if import firings, group_work

# Fewer firings or updates than these tell nothing.
FEWEST = 4
# By how much rows, or tokens, have to differ for two numbers to follow from them.
ROWS_DIFFER, TOKENS_DIFFER = 1.5, 1.3
# By how much products may be slower or, below 1, faster than the model has them.
SLOWER = (0.1, 1000.0)


class CalibrationError(ValueError):
    """A folder that the cost model cannot be calibrated by: what was given, and what is needed."""


class Decoded(NamedTuple):
    """One group's firing: seconds, and the rows that its replica decoded meanwhile, on average."""

    seconds: float
    rows: float


class Update(NamedTuple):
    """Seconds of an update, and what each of its optimizer steps learnt from."""

    seconds: float
    steps: Sequence[PackedBatch]


@dataclass(frozen=True)
class Calibration:
    """A kind of GPU with what was fitted; `words` say by which folder, and from how many samples."""

    kind: str
    gpu: Gpu
    words: str

    def on(self, cluster: Cluster) -> Cluster:
        """The cluster, with this kind in place of its own."""
        return cluster.model_copy(update={"gpus": {**cluster.gpus, self.kind: self.gpu}})


def fit_decoding(found: Sequence[Decoded], steps: float, context: float, generator: Generator) -> HostTime:
    """The engine by which groups of `steps` steps, with `context` tokens in each row's cache, take as long."""
    engine = generator.gpu.engine
    bare = _with(generator, engine.model_copy(update={"step_ms": 0.0, "row_us": 0.0}))
    rows = np.array([each.rows for each in found])
    kernels = np.array([bare.step(n, n * context).seconds for n in rows.tolist()])
    host = np.array([each.seconds for each in found]) / steps - kernels
    step, row = float(np.median(host - rows * engine.row_us * 1e-6)), engine.row_us * 1e-6
    if rows.max() >= ROWS_DIFFER * rows.min():
        step, row = _line(rows, host)
    return engine.model_copy(update={"step_ms": max(0.0, step) * 1e3, "row_us": max(0.0, row) * 1e6})


def fit_steps(found: Sequence[tuple[int, int, float]], engine: HostTime) -> HostTime:
    """The engine whose steps take as long as measured: (layers, rows, seconds) of models whose kernels take less time
    than the host, which launches each operation by itself. For `penstock doctor --measure`."""
    layers, rows, seconds = (np.array(column, np.float64) for column in zip(*found, strict=True))
    terms = np.stack([np.ones_like(rows), rows, layers * KERNELS], axis=1)
    step, row, eager = np.maximum(0.0, np.linalg.lstsq(terms, seconds, rcond=None)[0])
    update = {"step_ms": float(step) * 1e3, "row_us": float(row) * 1e6, "eager_us": float(eager) * 1e6}
    return engine.model_copy(update=update)


def fit_updates(found: Sequence[Update], trainer: Trainer) -> tuple[float, float]:
    """(factor, stage_s): an update takes the factor times the model's seconds, and `stage_s` before it."""
    engine, bare = trainer.gpu.engine, _bare(trainer)
    model = np.array([bare.steps(steps).seconds for _, steps in found])
    seconds = np.array([taken for taken, _ in found])
    tokens = [sum(step.tokens for step in steps) for _, steps in found]
    if max(tokens) >= TOKENS_DIFFER * min(tokens):
        stage_s, factor = _line(model, seconds)
        return factor, stage_s
    # All alike: what stands before them is taken to be the default, or nothing where they are shorter.
    stage_s = engine.stage_s if float(seconds.min()) > engine.stage_s else 0.0
    return float(np.median((seconds - stage_s) / model)), stage_s


def slowed(trainer: Trainer, factor: float, steps: Sequence[PackedBatch]) -> Efficiency:
    """The shares of matrix products and of attention, 1 at most, with which an update of these steps takes the factor
    times as long: they are slower by more, since the rest keeps its time."""
    bare, gpu = _bare(trainer), trainer.gpu
    wanted = factor * bare.steps(steps).seconds

    def shares(slower: float) -> Efficiency:
        found = {name: min(1.0, getattr(gpu.efficiency, name) / slower) for name in ("matmul", "attention")}
        return gpu.efficiency.model_copy(update=found)

    def seconds(slower: float) -> float:
        own = bare.gpu.model_copy(update={"efficiency": shares(slower)})
        return replace(bare, gpu=own).steps(steps).seconds

    return shares(halved(*SLOWER, lambda slower: seconds(slower) < wanted))


def _bare(trainer: Trainer) -> Trainer:
    """Without what stands before a stage."""
    engine = trainer.gpu.engine.model_copy(update={"stage_s": 0.0})
    return replace(trainer, gpu=trainer.gpu.model_copy(update={"engine": engine}))


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """(at 0, slope), by least squares, neither of them negative."""
    slope, start = np.polyfit(x, y, 1)
    if start < 0:
        return 0.0, float((x * y).sum() / (x * x).sum())
    return (float(start), float(slope)) if slope >= 0 else (float(y.mean()), 0.0)


def calibrate(folder: Path, cluster: Cluster, prompt_tokens: int) -> Calibration:
    """Raises CalibrationError for a folder of other hardware than the cluster's, of a model that is not there, or of
    too short a run."""
    where = f"--calibrate {folder}"
    try:
        run = RunFolder(folder)
        facts, asked = read_facts(run), run.read_json("config.json", ConfigFile).get("asked", {})
        kind = _kind(where, asked.get("cluster"), facts.config.plan, cluster)
        shape = read_shape(facts.config.flags.model)
        lengths = of_run(folder, facts.config.flags.max_tokens)
    except (RecordError, OSError, ValueError) as error:
        if isinstance(error, CalibrationError):
            raise
        raise CalibrationError(f"{where}: given a folder that tells nothing of seconds: {error}") from error
    stage = facts.training[-1] if facts.training else None
    if stage is None:
        raise CalibrationError(f"{where}: given a run that has not trained, needed updates")
    roles, flags = roles_of(stage.origin.graph), facts.config.flags
    shape = with_adapters(shape, stage.origin.graph, roles.cycle[0], flags.lora, flags.lora_targets)
    gpu = next(g for host in cluster.hosts if host.gpu == kind and (g := cluster.gpu_of(host)))
    meshes = {pool.name: Parallel.of(pool.replicas[0].mesh) for pool in stage.origin.plan.pools}
    precision: Precision = "fp32" if flags.dtype == "float32" else "bf16"
    generator = Generator(shape, gpu, meshes[roles.generator], flags.slots, precision)
    mesh = meshes[roles.trainer]
    trainer = Trainer(
        shape, gpu, mesh, precision, flags.micro_tokens or Trainer.micro_tokens, float(flags.recompute == "layer"),
        zero3=mesh.fsdp > 1, host_state=flags.optimizer_state == "host",
    )  # fmt: skip
    groups = lengths.take(256 * roles.samples).reshape(-1, roles.samples)
    steps, live = float(groups.max(axis=1).mean()), float((groups.mean(axis=1) / groups.max(axis=1)).mean())
    decoded = _decoded(stage, roles.generator, roles.samples * live)
    updates = _updates(stage, roles, facts.rows, flags.batch, prompt_tokens)
    for found, what in ((decoded, "groups"), (updates, "updates")):
        if len(found) < FEWEST:
            raise CalibrationError(f"{where}: given {len(found)} {what} once warm, needed at least {FEWEST}")
    engine = fit_decoding(decoded, steps, prompt_tokens + steps / 2, generator)
    factor, stage_s = fit_updates(updates, trainer)
    efficiency = slowed(trainer, factor, updates[len(updates) // 2].steps)
    syncs = [row["sync_s"] for row in facts.rows if row.get("sync_s")]
    moved = traffic(shape, trainer.mesh, generator.mesh, precision)
    wire_s = sync_cost(moved, flags.generators, gpu, gpu).seconds - engine.swap_s
    swap_s = max(0.0, median(syncs) - wire_s) if syncs else engine.swap_s
    engine = engine.model_copy(update={"stage_s": stage_s, "swap_s": swap_s})
    host = f"{engine.step_ms:.2g} ms a step and {engine.row_us:.2g} µs a row of the host by {len(decoded)} groups"
    others = f"updates {factor:.2g} times as long by {len(updates)}, {swap_s:.2g} s to swap by {len(syncs)} syncs"
    words = f"{folder}: {host}, {others}"
    return Calibration(kind, gpu.model_copy(update={"efficiency": efficiency, "engine": engine}), words)


def _kind(where: str, asked: object, ran: Plan, cluster: Cluster) -> str:
    """The kind of GPU that the run had, which the cluster has, too. `asked` is the run's cluster, as JSON."""
    given = "CPUs"
    if any(device != "cpu" for pool in ran.pools for _, device in pool.places):
        hosts = Cluster.model_validate(asked).hosts
        given = ", ".join(
            sorted({host.gpu or "GPUs of a kind that is not said" for host in hosts if host.accelerators})
        )
    planned = sorted({host.gpu for host in cluster.hosts if host.accelerators})
    if given not in planned:
        raise CalibrationError(f"{where}: given a run on {given}, needed one on {' or '.join(planned)}")
    return given


def _decoded(stage: StageHistory, pool: str, rows: float) -> list[Decoded]:
    """Of each firing of a generator but for the first quarter: a firing has `rows` rows in work on average."""
    lanes = defaultdict[str, list[tuple[int, int]]](list)
    for item in group_work(stage, pool):
        lanes[item.lane].append((item.start, item.end))
    found = []
    for spans in lanes.values():
        spans.sort()
        starts, ends = (np.array(column, np.float64) for column in zip(*spans, strict=True))
        for start, end in spans[len(spans) // 4 :]:
            shared = np.clip(np.minimum(ends, end) - np.maximum(starts, start), 0.0, None).sum()
            found.append(Decoded((end - start) / NS, float(shared / (end - start)) * rows))
    return found


def _updates(
    stage: StageHistory, roles: Roles, rows: Sequence[dict[str, object]], batch: int, prompt_tokens: int
) -> list[Update]:
    """Each update of `batch` fresh groups but for the first quarter."""
    mean = {row["update"]: row.get("response_length") for row in rows}
    taken = {index: took for (name, index), took in firings(stage.followed.work).items() if name == roles.cycle[-1]}
    responses = (batch + (roles.buffer.adds(batch) if roles.buffer else 0)) * roles.samples
    found = []
    for index in sorted(taken)[len(taken) // 4 :]:
        if isinstance(length := mean.get(index), int | float):
            sequences: IntArray = np.full(responses, max(1, round(length)) + prompt_tokens, np.int64)
            found.append(Update(taken[index], packed(sequences, roles.minibatches) * roles.epochs))
    return found


def _with(generator: Generator, engine: HostTime) -> Generator:
    return replace(generator, gpu=generator.gpu.model_copy(update={"engine": engine}))

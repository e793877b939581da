"""Calibrate the cost model by a finished run: host time, fixed seconds and efficiencies of one kind of GPU. Pure except
for reading the run's folder.

What is fitted, and to what:

- decoding: the seconds of each group's firing per step of its longest response, by the rows that its replica decoded
  meanwhile. Seconds that the model's kernels do not explain are host time: `step_ms`, and if the rows differ by half or
  more, `row_us`.
- updates: measured against modelled seconds. The efficiencies of matrix products and of attention become those with
  which the model takes as long. If the tokens of updates differ by 30 % or more, seconds that do not grow with them are
  `stage_s`.
- syncs: seconds that the wire does not explain are `swap_s`.

All else keeps its default. Lengths of single responses are not recorded: a group's longest response is taken from the
distribution that fits the run's metrics. The first quarter of the firings, which warms processes up, is left out.
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

# The fewest firings or updates to which a fit is made.
FEWEST = 4
# The least ratio between the most and the fewest rows, or tokens, for which a line of two parameters is fitted.
ROWS_DIFFER, TOKENS_DIFFER = 1.5, 1.3
# The range of factors by which products may be slower (or, below 1, faster) than in the model.
SLOWER = (0.1, 1000.0)


class CalibrationError(ValueError):
    """The cost model cannot be calibrated by a folder. The message says what was given and what is needed."""


class Decoded(NamedTuple):
    """One group's firing: its seconds, and the mean number of rows that its replica decoded meanwhile."""

    seconds: float
    rows: float


class Update(NamedTuple):
    """Seconds of an update, and the batch of each of its optimizer steps."""

    seconds: float
    steps: Sequence[PackedBatch]


@dataclass(frozen=True)
class Calibration:
    """A kind of GPU with the fitted numbers; `words` say from which folder, and from how many samples."""

    kind: str
    gpu: Gpu
    words: str

    def on(self, cluster: Cluster) -> Cluster:
        """The cluster with the calibrated kind in place of its own."""
        return cluster.model_copy(update={"gpus": {**cluster.gpus, self.kind: self.gpu}})


def fit_decoding(found: Sequence[Decoded], steps: float, context: float, generator: Generator) -> HostTime:
    """Fit the host time to groups of `steps` steps, with `context` tokens in each row's cache."""
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
    """Fit the host time to measured steps, (layers, rows, seconds), of models whose kernels take less time than the
    host, which launches each operation by itself. For `penstock doctor --measure`."""
    layers, rows, seconds = (np.array(column, np.float64) for column in zip(*found, strict=True))
    terms = np.stack([np.ones_like(rows), rows, layers * KERNELS], axis=1)
    step, row, eager = np.maximum(0.0, np.linalg.lstsq(terms, seconds, rcond=None)[0])
    update = {"step_ms": float(step) * 1e3, "row_us": float(row) * 1e6, "eager_us": float(eager) * 1e6}
    return engine.model_copy(update=update)


def fit_updates(found: Sequence[Update], trainer: Trainer) -> tuple[float, float]:
    """Fit (factor, stage_s): an update takes `stage_s` plus the factor times the model's seconds."""
    engine, bare = trainer.gpu.engine, _bare(trainer)
    model = np.array([bare.steps(steps).seconds for _, steps in found])
    seconds = np.array([taken for taken, _ in found])
    tokens = [sum(step.tokens for step in steps) for _, steps in found]
    if max(tokens) >= TOKENS_DIFFER * min(tokens):
        stage_s, factor = _line(model, seconds)
        return factor, stage_s
    # Updates of nearly equal size: `stage_s` is taken to be the default, or 0 if an update was shorter than that.
    stage_s = engine.stage_s if float(seconds.min()) > engine.stage_s else 0.0
    return float(np.median((seconds - stage_s) / model)), stage_s


def slowed(trainer: Trainer, factor: float, steps: Sequence[PackedBatch]) -> Efficiency:
    """The efficiencies of matrix products and of attention, at most 1, with which an update of these steps takes the
    factor times as long. Products slow down by more than the factor, since the rest keeps its time."""
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
    """The trainer without `stage_s`."""
    engine = trainer.gpu.engine.model_copy(update={"stage_s": 0.0})
    return replace(trainer, gpu=trainer.gpu.model_copy(update={"engine": engine}))


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """(value at 0, slope) by least squares, neither of them negative."""
    slope, start = np.polyfit(x, y, 1)
    if start < 0:
        return 0.0, float((x * y).sum() / (x * x).sum())
    return (float(start), float(slope)) if slope >= 0 else (float(y.mean()), 0.0)


def calibrate(folder: Path, cluster: Cluster, prompt_tokens: int) -> Calibration:
    """Calibrate by the run in `folder`. Raises CalibrationError for a run on other hardware than the cluster's, with a
    model that cannot be read, or too short."""
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
    """The run's kind of GPU; CalibrationError if the cluster lacks it. `asked` is the run's cluster, as JSON."""
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
    """The firings of a generator without each replica's first quarter. A firing has `rows` rows in work on average."""
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
    """The updates, of `batch` fresh groups each, without the first quarter."""
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

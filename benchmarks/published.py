"""The published rows as set-ups that the cost model can predict, selected by the rule in docs/measurements.md."""

import csv
import re
from dataclasses import dataclass
from pathlib import Path

from penstock.runtime.cluster.gpus import GPUS, Gpu
from penstock.runtime.plan.model_shape import SHAPES, Parallel, Shape

TABLE = Path(__file__).resolve().parent.parent.parent / "shared" / "data" / "published_steps.csv"
NAMES = {
    "Llama3.1-8B": "llama-8b",
    "Llama3.1-70B": "llama-70b",
    "Llama3.1-405B": "llama-405b",
    "DeepSeek-V3": "deepseek-v3",
    "Qwen3-235B": "qwen3-235b-a22b",
    "Qwen3-235B-A22B-Instruct-2507": "qwen3-235b-a22b",
    "Qwen3-30B-A3B": "qwen3-30b-a3b",
    "Qwen3-30B-A3B-Instruct-2507": "qwen3-30b-a3b",
    "Qwen3-32B": "qwen3-32b",
    "Qwen3-4B-Instruct-2507": "qwen3-4b",
    "Qwen3-0.6B": "qwen3-0.6b",
    "INTELLECT-3": "glm-4.5-air",
}
"""Names of shapes by the rows' model names; INTELLECT-3 is trained from GLM-4.5-Air."""

_POWER = (500 / 700) ** (1 / 3)
"""The clock rate grows with the cube root of the power: torchtitan's H100 of 96 GB have 500 W of 700."""


def _slower(gpu: Gpu) -> Gpu:
    tflops = gpu.tflops.model_copy(update={key: value * _POWER for key, value in gpu.tflops.model_dump().items()})
    return gpu.model_copy(update={"memory_gib": 96.0, "memory_gb_s": 2400.0, "tflops": tflops})


KINDS = {**GPUS, "H100-96G": _slower(GPUS["H100"])}


@dataclass(frozen=True)
class Row:
    """One published figure. `seconds` is for an RL step, or for the tokens of one micro-batch on each GPU."""

    number: int
    system: str
    source: str
    model: str
    kind: str
    gpus: int
    layout: str
    work: str
    longest: int
    mean: float
    mode: str
    staleness: int
    seconds: float
    per_gpu: float
    released: tuple[object, ...]

    @property
    def shape(self) -> Shape:
        return SHAPES[NAMES[self.model]]

    @property
    def gpu(self) -> Gpu:
        return KINDS[self.kind]

    @property
    def release(self) -> tuple[int, int]:
        """The system's release, as its source gives it; of two, the first: that of the tables."""
        match = re.search(r"v(\d+)\.(\d+)", self.source)
        return (int(match[1]), int(match[2])) if match else (0, 0)

    @property
    def setup(self) -> tuple[object, ...]:
        """What rows share that differ only in GPUs, layout, work, mode or release."""
        return (self.system, self.model, self.kind, self.longest)

    @property
    def name(self) -> str:
        return f"{self.model}, {self.gpus} × {self.kind}, {self.layout}, {self.longest}, {self.mode}"


def unusable(cells: dict[str, str]) -> str:
    """Return the reason why a row is not usable, by the rule in docs/measurements.md; empty if it is usable."""
    system, mode = cells["system"], cells["mode"]
    if system in ("LlamaRL", "NeMo-Aligner"):
        return "no batch, lengths or split"
    if system == "vime":
        return "no data sheet"
    if mode.startswith("DAPO"):
        return "groups sampled again, an unknown number of times"
    if mode.startswith("SWE"):
        return "an environment of unknown speed"
    if system == "prime-rl" and mode.startswith("RL Full"):
        return "whole weights written between steps, at an unknown speed"
    return ""


def read(path: Path = TABLE) -> tuple[list[Row], dict[str, int]]:
    """Return the usable rows, and the number of unusable ones by reason."""
    rows: list[Row] = []
    left: dict[str, int] = {}
    with path.open(newline="") as file:
        for number, cells in enumerate(csv.DictReader(file)):
            if reason := unusable(cells):
                left[reason] = left.get(reason, 0) + 1
            else:
                rows.append(_row(number, cells))
    return rows, left


# NeMo-RL 0.4's performance summary, which is not in the table (docs/about/performance-summary.md of its repository).
# No term or constant comes from these rows. Model, mode, longest, mean, GPUs, batches, generator, trainer, seconds.
LATER = """
Llama3.1-8B  On   4096 1060  16 2048 512 1,1  1,1,1,1,1,2  97.7
Llama3.1-8B  1off 4096 1129  16 2048 512 1,1  1,1,1,1,1,2  74.6
DeepSeek-V3  On   1536  745 256  512 512 32,1 1,1,16,16   154
DeepSeek-V3  1off 1536  744 512  512 512 32,1 1,1,16,16    77.9
Qwen3-235B   On   8192 5671 128  512 512 16,1 2,2,16,8    506
Qwen3-235B   1off 8192 5691 256  512 512 8,1  4,1,16,8    241
Qwen3-30B-A3B On  4096 3154  32 2048 512 4,1  2,1,8,1     225
Qwen3-30B-A3B 1off 4096 3158 32 2048 512 2,1  1,1,8,2     244
Qwen3-32B    On   4096 3206  32 2048 512 4,1  4,1,1,4     393
Qwen3-32B    1off 4096 3207  64 2048 512 4,1  4,1,1,4     215
"""


def later() -> list[Row]:
    """Return the rows of `LATER`."""
    rows = []
    for number, line in enumerate(LATER.strip().splitlines()):
        model, mode, longest, mean, gpus, sampled, batch, width, mesh, seconds = line.split()
        rows.append(
            Row(
                number, "NeMo-RL", "NeMo-RL v0.4", model, "H100", int(gpus), f"gen=[{width}] train=[{mesh}]",
                f"G-GBS {sampled} / T-GBS {batch}", int(longest), float(mean), f"GRPO {mode} BF16",
                int(mode == "1off"), float(seconds), 0.0, (),
            )
        )  # fmt: skip
    return rows


def _row(number: int, cells: dict[str, str]) -> Row:
    system, longest = cells["system"], int(cells["max_len"])
    kind = re.sub(r"^\d+x| HBM3", "", cells["hardware"])
    gpus, rate = int(cells["gpus"]), float(cells["throughput"].removesuffix("k"))
    work = cells["prompts_x_samples"]
    if system == "NeMo-RL":
        seconds, per_gpu = float(cells["step_s"]), rate
    elif system == "torchtitan":
        mesh, cp = mesh_of(cells["placement(gen:train)"])
        data = mesh.data // cp
        seconds, per_gpu = _number("local bs", work) * longest * data / gpus / rate, rate
    else:
        seconds, per_gpu = gpus * longest / (rate * 1000), rate * 1000 / gpus
    layout, model = cells["placement(gen:train)"], cells["model"]
    # What identifies a row across releases of a project.
    released = (system, model, kind, gpus, cells["mode"], longest, work, layout if system != "NeMo-RL" else "")
    return Row(
        number, system, cells["source"], model, kind, gpus, layout, work, longest, float(cells["mean_len"] or 0),
        cells["mode"], int(cells["staleness"] or 0), seconds, per_gpu, released,
    )  # fmt: skip


def _number(name: str, text: str) -> int:
    match = re.search(rf"{name} ?(\d+)", text)
    return int(match[1]) if match else 1


def mesh_of(words: str) -> tuple[Parallel, int]:
    """Parse `FSDP8 TP8 PP8` of torchtitan and prime-rl; also return how many ranks share a sequence (CP). Weights are
    sharded over those ranks, too."""
    fsdp, tp, pp, cp = (_number(axis, words) for axis in ("FSDP", "TP", "PP", "CP"))
    return Parallel(fsdp=fsdp * cp, tp=tp, pp=pp), cp


def nemo_layouts(row: Row) -> tuple[tuple[Parallel, int, int], Parallel, int]:
    """Return the trainer's mesh with its CP and EP, the generator's mesh, and its number of replicas. Layouts are [TP,
    CP, EP, PP, VPP]; in those with six numbers, all of the 8B model, the last one is PP, as its recipe says."""
    lists = re.findall(r"\[([^\]]*)\]", row.layout.replace("[TP,PP]", "").replace("..", "1"))
    width, depth = (int(size) for size in lists[0].split(","))
    sizes = [int(size) for size in lists[1].split(",")]
    tp, cp, ep, pp = (sizes[0], sizes[1], sizes[2], sizes[-1]) if len(sizes) == 6 else (*sizes, 1, 1, 1)[:4]
    trains = {0: row.gpus, 1: row.gpus // 2, 8: row.gpus * 2 // 3}[row.staleness]
    decodes = row.gpus - trains if row.staleness else row.gpus
    data = trains // (tp * cp * pp)
    # One row shards experts over more ranks than half of its GPUs: EP is limited to the ranks that there are.
    mesh = Parallel(fsdp=data * cp, tp=tp, pp=pp)
    return (mesh, cp, min(ep, mesh.stage)), Parallel(tp=width, pp=depth), max(1, decodes // (width * depth))

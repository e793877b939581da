"""From what `penstock doctor --measure` has measured to a cluster file with this machine in it. Pure.

The constants of a way (see `machine.Passes`) are those with which the cost model's own formulas come nearest to the
reference passes: least squares of the relative error, none below zero. Nothing of a real run is among them.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from penstock.runtime.plan.cost import Cost
from penstock.runtime.plan.gpus import GPUS, Gpu, Precision, Tflops
from penstock.runtime.plan.local import LocalGenerator, LocalTrainer
from penstock.runtime.plan.machine import Cpu, Passes
from penstock.runtime.plan.shape import Shape

THIS = "this"
"""The name of the kind that was measured."""
LEAST = 1e-9
"""A share of a reference's seconds below which a constant is taken to be nothing."""


def cpu_of(raw: Mapping[str, Any], memory_gib: float) -> Cpu:
    """`raw` is what the measuring child printed for a CPU."""
    memory, links = raw["memory"], raw["links"]
    return Cpu(
        cores=raw["cores"],
        rest=raw["rest"],
        memory_gib=memory_gib,
        read_gb_s=memory["read"],
        copy_gb_s=memory["copy"],
        cached_gb_s=memory["cached"],
        beside_gb_s=raw["memory_beside"]["copy"],
        call_us=raw["launch_us"],
        crowded=raw["crowded"],
        **links,
        turns={name: _decoding(name, found) for name, found in raw["turns"].items()},
        beside={name: _decoding(name, found) for name, found in raw["beside"].items()},
        training={name: _training(name, found) for name, found in raw["training"].items()},
    )


def gpu_of(raw: Mapping[str, Any]) -> Gpu:
    """The same of a CUDA device: the best of the measured rates of each precision are what it reaches. Its links to
    other GPUs are those of the known kind that its name has in it, else of none."""
    known = next((gpu for name, gpu in GPUS.items() if name in raw["name"]), None)
    base = (known or GPUS["A100"].model_copy(update={"nvlink_gb_s": 0.0})).model_dump()
    share = base["efficiency"]["matmul"]
    rates = {name: max(rate for _, _, rate in found) / 1e12 / share for name, found in raw["products"].items()}
    return Gpu.model_validate(
        {
            **base,
            "memory_gib": raw["memory_gib"],
            "tflops": Tflops(**{**base["tflops"], **rates}),
            "memory_gb_s": raw["memory"]["copy"] / base["efficiency"]["memory"],
            "pcie_gb_s": raw["host_gb_s"] / base["efficiency"]["link"],
            "launch_us": raw["launch_us"],
        }
    )


def cluster_facts(kinds: Mapping[str, Gpu], cpu: Cpu) -> dict[str, Any]:
    """The cluster file's content; `kinds` by CUDA device, of which the first one's stands for all."""
    host: dict[str, Any] = {"name": "local", "cores": cpu.cores, "cpu": THIS}
    found: dict[str, Any] = {"hosts": [host], "cpus": {THIS: cpu.model_dump()}}
    if kinds:
        host |= {"devices": list(kinds), "gpu": THIS}
        found["gpus"] = {THIS: next(iter(kinds.values())).model_dump()}
    return found


def toml(facts: Mapping[str, Any], prefix: str = "") -> str:
    """TOML of nested dicts of numbers, strings and lists."""
    plain, tables = [], []
    for name, value in facts.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            tables.append(f"\n[{path}]\n{toml(value, f'{path}.')}")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            tables += [f"\n[[{path}]]\n{toml(item, f'{path}.')}" for item in value]
        else:
            plain.append(f"{name} = {_toml_value(value)}\n")
    return "".join(plain + tables)


def _toml_value(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml_value(item) for item in value)}]"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _shape(reference: Mapping[str, Any]) -> Shape:
    names = ("vocab", "hidden", "layers", "heads", "head_dim", "inner")
    sizes = {name: reference[name] for name in names}
    return Shape("reference", **sizes, kv_heads=reference["heads"], tied=True)


def _decoding(name: Precision, found: Mapping[str, Any]) -> Passes:
    unit = Passes(lanes=1, products=found["products"], launch_us=1.0, element_gb_s=1.0, attention_gb_s=1.0)
    seen: list[tuple[Cost, float]] = []
    for reference in found["decodes"]:
        generator = LocalGenerator(_shape(reference), unit, reference["rows"], 1 << 30, name)
        seen += [(generator.step(round(reach)), seconds) for reach, seconds in reference["steps"]]
    launch, element, cache = _fitted(seen, (("launches",), ("elementwise", "logits"), ("cache",)))
    rates = {"launch_us": launch, "element_gb_s": 1 / element, "attention_gb_s": 1 / cache}
    return unit.model_copy(update=rates)


def _training(name: Precision, found: Mapping[str, Any]) -> Passes:
    unit = Passes(
        lanes=found["steps"][0]["lanes"],
        products=found["products"],
        launch_us=1.0,
        element_gb_s=1.0,
        attention_gflops=1.0,
        optimizer=tuple((o["parameters"], o["seconds"] / o["parameters"]) for o in found["optimizer"]),
    )
    seen = [
        (LocalTrainer(_shape(r), unit, 1.0, precision=name).micro(r["rows"], r["tokens"]), r["seconds"])
        for r in found["steps"]
    ]
    launch, element, attention = _fitted(seen, (("launches",), ("elementwise", "logits"), ("attention",)))
    rates = {"launch_us": launch, "element_gb_s": 1 / element, "attention_gflops": 1 / attention}
    return unit.model_copy(update=rates)


def _fitted(seen: Sequence[tuple[Cost, float]], groups: Sequence[Sequence[str]]) -> list[float]:
    """Factors, none below zero, of the groups of parts that are to be in units, whose sum with the products is nearest
    to what was seen. Every subset of the groups is solved; the best one without a negative factor counts."""
    parts = np.array([[sum(cost.parts[part] for part in group) / s for group in groups] for cost, s in seen])
    target = np.array([1.0 - cost.parts["products"] / s for cost, s in seen])
    best, error = np.zeros(len(groups)), float(np.sum(target**2))
    for size in range(1, len(groups) + 1):
        for chosen in combinations(range(len(groups)), size):
            factors = np.linalg.lstsq(parts[:, chosen], target, rcond=None)[0]
            left = float(np.sum((parts[:, chosen] @ factors - target) ** 2))
            if factors.min() >= 0 and left < error:
                best, error = np.zeros(len(groups)), left
                best[list(chosen)] = factors
    floors = LEAST / parts.max(axis=0)
    return [max(float(value), float(floor)) for value, floor in zip(best, floors, strict=True)]

"""A machine of round figures."""

from typing import Any

from penstock.runtime.plan.machine import Cpu, Passes

UNIT = Passes(
    lanes=2,
    products=((16, 128, 1e11), (16, 1024, 1e11), (1024, 128, 1e11), (1024, 1024, 1e11)),
    launch_us=10.0,
    element_gb_s=5.0,
    attention_gb_s=10.0,
    attention_gflops=100.0,
    optimizer=((1_000_000, 1e-9),),
)


def cpu(**changes: Any) -> Cpu:
    ways = {way: {"fp32": UNIT} for way in ("turns", "beside", "training")}
    facts = {
        "cores": 2, "rest": 1, "memory_gib": 16, "read_gb_s": 20, "copy_gb_s": 20, "cached_gb_s": 80, "beside_gb_s": 15,
        "shared_gb_s": 8, "gloo_gb_s": 2, "latency_us": 80, "call_us": 1,
        "crowded": {"trainer": 1.5, "generator": 1.5}, **ways,
    }  # fmt: skip
    return Cpu.model_validate({**facts, **changes})

import pytest

from penstock.runtime.plan.gpus import GPUS
from penstock.runtime.plan.local import LocalGenerator, LocalTrainer
from penstock.runtime.plan.measured import _decoding, _shape, _training, gpu_of

from .machines import UNIT

REFERENCES = [
    {"hidden": d, "layers": layers, "rows": rows, "tokens": tokens, "vocab": 258, "heads": d // 64, "head_dim": 64,
     "inner": d * 8 // 3}
    for d, layers, rows, tokens in ((192, 2, 64, 64), (192, 4, 128, 64), (384, 2, 32, 256), (640, 2, 64, 32))
]  # fmt: skip


def test_constants_of_decoding_are_found_again() -> None:
    known = UNIT.model_copy(update={"lanes": 1, "attention_gflops": 0.0, "optimizer": ()})
    decodes = []
    for reference in REFERENCES:
        generator = LocalGenerator(_shape(reference), known, reference["rows"], 1 << 30, "fp32")
        steps = [(reach, generator.step(reach).seconds) for reach in (10, 30, 60)]
        decodes.append({**reference, "steps": steps})
    found = _decoding("fp32", {"products": known.products, "decodes": decodes})
    for name in ("launch_us", "element_gb_s", "attention_gb_s"):
        assert getattr(found, name) == pytest.approx(getattr(known, name), rel=1e-6)


def test_constants_of_training_are_found_again() -> None:
    known = UNIT.model_copy(update={"attention_gb_s": 0.0})
    steps = []
    for reference in REFERENCES:
        trainer = LocalTrainer(_shape(reference), known, 1.0)
        steps.append(
            {**reference, "lanes": 2, "seconds": trainer.micro(reference["rows"], reference["tokens"]).seconds}
        )
    optimizer = [{"parameters": 1_000_000, "seconds": 1e-3}]
    found = _training("fp32", {"products": known.products, "steps": steps, "optimizer": optimizer})
    for name in ("launch_us", "element_gb_s", "attention_gflops"):
        assert getattr(found, name) == pytest.approx(getattr(known, name), rel=1e-6)
    assert found.optimizer == known.optimizer


def test_a_constant_that_would_be_negative_is_nothing() -> None:
    known = UNIT.model_copy(update={"lanes": 1})
    decodes = [
        {**r, "steps": [(10, LocalGenerator(_shape(r), known, r["rows"], 99).step(10).parts["products"] * 0.9)]}
        for r in REFERENCES
    ]
    found = _decoding("fp32", {"products": known.products, "decodes": decodes})
    step = LocalGenerator(_shape(REFERENCES[0]), found, 64, 99).step(10)
    assert step.seconds == pytest.approx(step.parts["products"], rel=1e-6)


def test_a_gpu_keeps_the_links_of_its_kind_and_reaches_the_measured_rates() -> None:
    raw = {
        "name": "NVIDIA H100 80GB HBM3", "memory_gib": 79.1, "memory": {"read": 2900.0, "copy": 2700.0},
        "launch_us": 4.5, "host_gb_s": 55.0, "products": {"bf16": [[16, 1024, 1e13], [8192, 8192, 7e14]]},
    }  # fmt: skip
    found = gpu_of(raw)
    assert found.flops("bf16") == pytest.approx(7e14)
    assert found.bandwidth == pytest.approx(2.7e12)
    assert found.nvlink_gb_s == GPUS["H100"].nvlink_gb_s
    assert found.flops("fp8") == GPUS["H100"].flops("fp8")

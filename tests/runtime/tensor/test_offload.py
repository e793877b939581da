"""State that leaves and comes back has every bit it had, and its memory is lent only while it is away."""

import math
import threading

import pytest
import torch
from torch import Tensor, nn

from penstock.runtime.tensor.offload import Offload, OffloadError


def state() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "exp_avg": torch.randn(300, 70, generator=generator),
        "master": torch.randn(1000, generator=generator).to(torch.bfloat16),
        "odd": torch.tensor([math.nan, -0.0, math.inf]),
        "step": torch.tensor(7, dtype=torch.int64),
        "flags": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 4),
    }


def bits(tensors: dict[str, Tensor]) -> dict[str, list[int]]:
    return {name: t.contiguous().view(-1).view(torch.uint8).tolist() for name, t in tensors.items()}


def away(offload: Offload) -> Tensor:
    offload.leave()
    offload.fence()
    return offload.lend()


def test_every_bit_comes_back_whatever_the_memory_was_used_for() -> None:
    given = state()
    offload = Offload("trainer/0", given)
    held = dict(offload.tensors)
    assert bits(held) == bits(given)
    for round_ in range(3):
        memory = away(offload)
        assert memory.nbytes == offload.nbytes
        memory.fill_(round_ + 17)
        assert bits(held) != bits(given)
        offload.come_back()
        offload.fence()
        assert bits(held) == bits(given)
        for name in ("exp_avg", "step"):
            held[name].add_(1)
            given[name].add_(1)
    assert all(offload.tensors[name] is tensor for name, tensor in held.items())


def test_an_optimizer_goes_on_as_if_its_state_had_never_been_away() -> None:
    def trained(with_offload: bool) -> Tensor:
        torch.manual_seed(3)
        layer = nn.Linear(5, 4)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
        offload = None
        for _ in range(5):
            layer(torch.ones(2, 5)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if with_offload and offload is None:
                entries = optimizer.state.items()
                moments = {f"{i}.{k}": s[k] for i, (_, s) in enumerate(entries) for k in ("exp_avg", "exp_avg_sq")}
                offload = Offload("trainer/0", moments)
                for i, (_, s) in enumerate(optimizer.state.items()):
                    s.update({k: offload.tensors[f"{i}.{k}"] for k in ("exp_avg", "exp_avg_sq")})
            if offload is not None:
                away(offload).fill_(255)
                offload.come_back()
                offload.fence()
        return layer.weight.detach()

    assert torch.equal(trained(True), trained(False))


def test_memory_is_lent_only_while_the_state_is_away() -> None:
    offload = Offload("trainer/0", state())
    with pytest.raises(OffloadError, match="trainer/0: lend: given on the device, needed on the host"):
        offload.lend()
    with pytest.raises(OffloadError, match="given on the device, needed on the host"):
        offload.come_back()
    offload.leave()
    with pytest.raises(OffloadError, match="given on the device, moving, needed on the host"):
        offload.lend()
    with pytest.raises(OffloadError, match="moving"):
        offload.leave()
    offload.fence()
    assert offload.fence() == 0.0
    with pytest.raises(OffloadError, match="given on the host, needed on the device"):
        offload.leave()


def test_a_move_that_hangs_meets_the_deadline_and_may_still_end(monkeypatch: pytest.MonkeyPatch) -> None:
    offload, release = Offload("trainer/0", state()), threading.Event()
    copy = offload._copy
    monkeypatch.setattr(offload, "_copy", lambda *given: release.wait(30) and copy(*given))
    offload.leave()
    with pytest.raises(OffloadError, match=r"trainer/0: 6 tensors, \d+ bytes, to the host: not there after 0.01 s"):
        offload.fence(0.01)
    release.set()
    offload.fence()
    assert offload.where == "host"


def test_a_move_that_fails_says_why_and_leaves_the_state_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    offload = Offload("trainer/0", state())

    def refuse(*_: object) -> None:
        raise RuntimeError("no such device")

    with monkeypatch.context() as patch:
        patch.setattr(offload, "_copy", refuse)
        offload.leave()
        with pytest.raises(OffloadError, match="to the host: no such device"):
            offload.fence()
    assert offload.where == "device"
    assert bits(offload.tensors) == bits(state())
    away(offload)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_state_on_a_gpu_leaves_after_what_the_stream_was_given() -> None:
    offload = Offload("trainer/0", {"exp_avg": torch.zeros(1 << 24)}, "cuda")
    for _ in range(50):
        offload.tensors["exp_avg"].add_(1)
    away(offload).fill_(3)
    offload.come_back()
    offload.fence()
    assert bool((offload.tensors["exp_avg"] == 50).all())

"""State that leaves and comes back has every bit it had, and can be read wherever it lies."""

import math
import threading

import pytest
import torch
from torch import Tensor, nn

from penstock.runtime.tensor import offload as module
from penstock.runtime.tensor.offload import Offload, OffloadError


def state() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "exp_avg": torch.randn(300, 70, generator=generator),
        "master": nn.Parameter(torch.randn(1000, generator=generator).to(torch.bfloat16)),
        "odd": torch.tensor([math.nan, -0.0, math.inf]),
        "step": torch.tensor(7, dtype=torch.int64),
        "flags": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 4),
    }


def bits(tensors: dict[str, Tensor]) -> dict[str, list[int]]:
    return {name: t.detach().contiguous().view(-1).view(torch.uint8).tolist() for name, t in tensors.items()}


def places(tensors: dict[str, Tensor]) -> list[int]:
    return [t.untyped_storage().data_ptr() for t in tensors.values() if t.numel()]


def away(offload: Offload, tensors: dict[str, Tensor]) -> None:
    offload.leave(tensors)
    offload.fence()


def back(offload: Offload) -> None:
    offload.come_back()
    offload.fence()


def test_every_bit_is_there_wherever_it_lies_and_the_device_memory_is_given_back() -> None:
    given, held = state(), state()
    offload, objects = Offload("trainer/0"), list(held.values())
    room: set[int] = set()
    for _ in range(3):
        at_home = places(held)
        away(offload, held)
        assert bits(held) == bits(given)
        room |= set(places(held))
        assert len(room) == 1  # all in one piece, the same each time
        back(offload)
        assert bits(held) == bits(given)
        assert room.isdisjoint(places(held))
        assert len(set(at_home)) == 5
        for name in ("exp_avg", "step"):
            held[name].add_(1)
            given[name].add_(1)
    assert all(ours is theirs for ours, theirs in zip(objects, held.values(), strict=True))
    assert offload.moves == 6
    assert offload.nbytes == sum(t.nbytes for t in held.values())


def test_what_is_new_leaves_with_the_rest() -> None:
    held = {"master": torch.ones(5)}
    offload = Offload("trainer/0")
    away(offload, held)
    back(offload)
    held["exp_avg"] = torch.full((7,), 2.0)
    away(offload, held)
    assert len(set(places(held))) == 1
    assert [t.tolist() for t in held.values()] == [[1.0] * 5, [2.0] * 7]


def test_an_optimizer_goes_on_as_if_its_state_had_never_been_away() -> None:
    def trained(with_offload: bool) -> Tensor:
        torch.manual_seed(3)
        layer = nn.Linear(5, 4)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
        offload = Offload("trainer/0")
        for _ in range(5):
            layer(torch.ones(2, 5)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if with_offload:
                entries = enumerate(optimizer.state.values())
                moments = {f"{i}.{key}": s[key] for i, s in entries for key in ("exp_avg", "exp_avg_sq")}
                away(offload, {**dict(layer.named_parameters()), **moments})
                back(offload)
        return layer.weight.detach()

    assert torch.equal(trained(True), trained(False))


def test_moves_follow_each_other() -> None:
    offload, held = Offload("trainer/0"), state()
    with pytest.raises(OffloadError, match="trainer/0: move from the host: given on the device, needed on the host"):
        offload.come_back()
    offload.leave(held)
    with pytest.raises(OffloadError, match="moving"):
        offload.leave(held)
    offload.fence()
    offload.fence()
    with pytest.raises(OffloadError, match="given on the host, needed on the device"):
        offload.leave(held)


def test_a_move_that_hangs_meets_the_deadline_and_may_still_end(monkeypatch: pytest.MonkeyPatch) -> None:
    offload, release = Offload("trainer/0"), threading.Event()
    monkeypatch.setattr(module, "give_back", lambda: release.wait(30))
    offload.leave(state())
    with pytest.raises(OffloadError, match=r"trainer/0: 6 tensors, \d+ bytes, to the host: not there after 0.01 s"):
        offload.fence(0.01)
    release.set()
    offload.fence()
    assert offload.where == "host"


def test_a_move_that_fails_says_why_and_leaves_the_state_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    offload, held = Offload("trainer/0"), state()

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no such device")

    with monkeypatch.context() as patch:
        patch.setattr(module, "touched", refuse)
        offload.leave(held)
        with pytest.raises(OffloadError, match="to the host: no such device"):
            offload.fence()
    assert offload.where == "device"
    assert bits(held) == bits(state())
    away(offload, held)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", refuse)
        offload.come_back()
        with pytest.raises(OffloadError, match="to the device: no such device"):
            offload.fence()
    assert bits(held) == bits(state())
    back(offload)
    assert bits(held) == bits(state())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_state_on_a_gpu_leaves_after_what_the_stream_was_given_and_gives_its_memory_back() -> None:
    held = {"exp_avg": torch.zeros(1 << 24, device="cuda")}
    offload = Offload("trainer/0")
    for _ in range(3):
        before = torch.cuda.memory_reserved()
        for _ in range(50):
            held["exp_avg"].add_(1)
        away(offload, held)
        assert held["exp_avg"].is_pinned()
        assert torch.cuda.memory_reserved() <= before - held["exp_avg"].nbytes
        back(offload)
        assert held["exp_avg"].is_cuda
    assert bool((held["exp_avg"] == 150).all())

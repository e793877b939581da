"""Record what vLLM samples with our weights: python -m tests.gates.vllm_cases FOLDER, in an interpreter that has vLLM.
It writes the findings of each rank of each kind to FOLDER/KIND/RANK.json, by case.

The model is small and random; weights of versions 0 and 1 differ in every tensor. They come over a link within the
process, with their digests. Each rank is a process and gets its part; all are forked from one that has imported vLLM.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.graph.context import Context
from penstock.graph.node import Paused, UntrustedError
from penstock.graph.protocols import Sharding
from penstock.graph.types import Prompts, Replies, Rollouts
from penstock.nodes.generate import open_engine, vllm_engine, vllm_weights
from penstock.nodes.generate.sampling import mismatch
from penstock.nodes.generate.vllm_engine import VllmEngine
from penstock.nodes.model import CausalLM
from penstock.nodes.model.tensor_parallel import tensor_parallel
from penstock.runtime.tensor.weight_sync import WeightPublisher, WeightReceiver, sync_in_process
from tests.nodes.tiny_model import CONFIG, TOKENIZER, save

# isort: split
from vllm.outputs import CompletionOutput, RequestOutput

SHAPE: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
MAX_TOKENS = 24
# The number of ranks that share the model, by kind.
KINDS = {"untied": 1, "tied": 1, "shared": 2}


class Sent:
    """A carried value whose weights are whole on its one rank."""

    def __init__(self, model: CausalLM) -> None:
        self.model = model

    def weights(self) -> Mapping[str, Tensor]:
        return {name: tensor.detach() for name, tensor in self.model.named_parameters()}

    def sharding(self) -> Sharding:
        rules = tensor_parallel(self.model.config)
        return Sharding((), {name: tuple(t.shape) for name, t in self.weights().items()}, rules, rules)

    def state(self) -> Any: ...
    def restore(self, tensors: Any, facts: Any) -> None: ...
    def export(self, folder: str) -> None: ...


def added(sums: Tensor) -> Tensor:
    total = sums.clone()
    dist.all_reduce(total)
    return total


class Cases:
    def __init__(self, folder: Path, tied: bool, ranks: int = 1, rank: int = 0) -> None:
        mesh = (("tp", ranks),) if ranks > 1 else ()
        config = replace(CONFIG, **SHAPE, tie_word_embeddings=tied)
        self.models = [CausalLM(config) for _ in range(3)]
        for seed, model in enumerate(self.models):
            model.init_weights(seed)
            for parameter in model.parameters():
                if parameter.ndim == 1:  # norms begin as ones
                    parameter.data = torch.linspace(0.5, 1.0 + 0.2 * seed, parameter.numel())
        if rank == 0:
            save(self.models[0], folder)
            TOKENIZER.save(folder)
        if mesh:
            dist.barrier()
        given: dict[str, Any] = {"max_tokens": MAX_TOKENS, "slots": 8, "seed": 5, "max_prompt": 64}
        self.context = Context(node="generate", model=str(folder), mesh=mesh, rank=rank, **given)
        fused, add = self.engine(samples=1).fused(), added if mesh else None
        self.publisher = WeightPublisher("policy>generator", Sent(self.models[0]))
        self.receiver = WeightReceiver("policy>generator", rank=rank, mesh=mesh or None, add=add, fused=fused)
        self.receiver.describe(self.publisher.description)
        self.behaviour = self.receiver.weights

    def swap(self, version: int) -> None:
        """Send a version, verify it, and swap its tensors into the same `behaviour` object."""
        digests = self.publisher.publish(version, Sent(self.models[version % 3]))
        sync_in_process(self.publisher, self.receiver, version, digests)
        self.receiver.swap(version)

    def engine(self, **options: Any) -> VllmEngine:
        segment = options.pop("segment", 0)
        made = open_engine(replace(self.context, segment=segment), engine="vllm", **options)
        assert isinstance(made, VllmEngine)
        return made

    def submit(self, engine: VllmEngine, ordinal: int, text: str = "1+2=", **more: Any) -> None:
        prompts = Prompts((ordinal,), (text,), ("3",))
        engine.submit(ordinal, {"prompts": prompts, "behaviour": self.behaviour, **more})

    def drain(self, engine: VllmEngine, each: Callable[[int], None] = lambda step: None) -> dict[int, Any]:
        results: dict[int, Any] = {}
        step = 0
        while engine.busy():
            each(step)
            results |= dict(engine.step())
            step += 1
        return results

    def differences(self, rollouts: Rollouts) -> dict[str, float]:
        """Return, by version, the difference to the trainer's forward pass with the weights of that version."""
        found = {int(version) for version in rollouts.versions_NT[rollouts.versions_NT >= 0].tolist()}
        lengths = rollouts.response_lengths_N
        ends = torch.arange(rollouts.versions_NT.shape[1])[None] < lengths[:, None]
        there = {v for v in found if bool(((rollouts.versions_NT == v) & ends).any())}
        return {str(version): mismatch(self.models[version % 3], rollouts, version) for version in sorted(there)}

    # Cases ----------------------------------------------------------------------------------------------------

    def swapped_within(self) -> Mapping[str, Any]:
        """Swap to version 1 when rows have eight tokens. A group that begins then uses version 1 alone."""
        self.swap(0)
        engine = self.engine(samples=4)

        def each(step: int) -> None:
            if step == 8:
                self.swap(1)
                self.submit(engine, 1)

        self.submit(engine, 0)
        results = self.drain(engine, each)
        (first, figures), (second, later) = results[0], results[1]
        return {
            "first": self.differences(first),
            "second": self.differences(second),
            "mixed_rows": sum(
                len(set(row[:n].tolist())) == 2
                for row, n in zip(first.versions_NT, first.response_lengths_N.tolist(), strict=True)
            ),
            "sorted": all(
                row[:n].tolist() == sorted(row[:n].tolist())
                for row, n in zip(first.versions_NT, first.response_lengths_N.tolist(), strict=True)
            ),
            "distinct_rows": len({tuple(row.tolist()) for row in first.tokens_NS}),
            "mismatches": [found["mismatch"] for found in (figures, later) if "mismatch" in found],
            "stale": [figures["stale_cache"], later["stale_cache"]],
            "compared": engine.vllm.compared,
            "models": len(vllm_engine._MODELS),
            "copied": engine.vllm.copied,
            "tokens": [rollouts.tokens_NS.tolist() for rollouts in (first, second)],
        }

    def paused(self) -> Mapping[str, Any]:
        """Sample segments of six tokens, each with other weights."""
        self.swap(3)
        engine, segments = self.engine(samples=2, segment=6), 0
        paused: dict[str, Any] = {}
        while True:
            self.submit(engine, 7, **paused)
            made = self.drain(engine)[7]
            segments += 1
            if not isinstance(made, Paused):
                break
            paused = {"paused": made.value}
            self.swap(self.behaviour.version + 1)
        rollouts, _ = made
        return {
            "segments": segments,
            "differences": self.differences(rollouts),
            "longest": int(max(rollouts.lengths())),
        }

    def turns(self) -> Mapping[str, Any]:
        self.swap(9)
        engine = self.engine(samples=2)
        keys, add = [], engine.vllm.add

        def added(tokens: Any, sampling: Any, sink: Any) -> str:
            keys.append(sampling.seed)
            return add(tokens, sampling, sink)

        engine.vllm.add = added  # type: ignore[method-assign]
        self.submit(engine, 2)
        first, _ = self.drain(engine)[2]
        replies = Replies(("4+4=", "5-1="), ("user", "user"), torch.tensor([False, True]))
        self.submit(engine, 2, conversation=first, replies=replies)
        second, _ = self.drain(engine)[2]
        engine.vllm.add = add  # type: ignore[method-assign]
        ends = enumerate((first.prompt_lengths_N + first.response_lengths_N).tolist())
        rows = [(first.tokens_NS[row, :end].tolist(), second.tokens_NS[row, :end].tolist()) for row, end in ends]
        return {
            "kept": [before == after for before, after in rows],
            "turns": second.turns(),
            "keys": keys,
            "differences": self.differences(second),
        }

    def stopped(self) -> Mapping[str, Any]:
        """Responses end at a stop string, which stays in the text, and at a stop token, which does not."""
        self.swap(12)
        engine = self.engine(samples=8, stop=("a",))
        self.submit(engine, 3)
        rollouts, _ = self.drain(engine)[3]
        rows = zip(rollouts.texts, rollouts.finished_N.tolist(), rollouts.lengths(), strict=True)
        return {"rows": [(text, finished, int(length)) for text, finished, length in rows]}

    def many_slots(self) -> Mapping[str, Any]:
        """Use more slots, and more tokens of prompts and of a recomputed cache, than vLLM computes in a step."""
        self.swap(18)
        engine = open_engine(replace(self.context, slots=vllm_engine.STEP + 1), engine="vllm", samples=64)
        assert isinstance(engine, VllmEngine)
        self.submit(engine, 8, "1+2=3-4+" * 6)
        return self.differences(self.drain(engine, lambda step: self.swap(19) if step == 4 else None)[8][0])

    def few_tokens(self) -> Mapping[str, Any]:
        """Compare a row again and again whose mean difference from the trainer exceeds the limit. Return how often
        there were too few tokens to raise, and the difference in units of the limit."""
        self.swap(17)
        engine = self.engine(samples=1)
        self.submit(engine, 9)
        vllm, (rollouts, _) = engine.vllm, self.drain(engine)[9]
        apart, tokens, kept = vllm.apart, vllm.compared, vllm.limit
        vllm.apart, vllm.compared, vllm.limit, passed = 0.0, 0, 1.5 * apart / vllm_engine.COMPARED, 0
        try:
            while passed < 10:
                vllm.prove(rollouts, "here")
                passed += 1
        except UntrustedError:
            pass
        finally:
            limit, vllm.limit = vllm.limit, kept
        return {"passed": passed, "limits": apart / tokens / limit}

    def too_many_slots(self) -> Mapping[str, Any]:
        """Ask for more slots than any machine has memory for."""
        try:
            open_engine(replace(self.context, slots=10**9), engine="vllm")
        except ValueError as error:
            return {"raised": str(error)}
        return {"raised": ""}

    def given_up(self) -> Mapping[str, Any]:
        """vLLM ends a request for a reason of its own."""
        self.swap(13)
        engine = self.engine(samples=1)
        self.submit(engine, 6)
        engine.step()
        ((name, sink),) = engine.vllm.sinks.items()
        ended = CompletionOutput(0, "", [], None, None, finish_reason="error", stop_reason="a lost block")
        try:
            sink(RequestOutput(name, None, [1], None, [ended], True))
        except RuntimeError as error:
            engine.reset()
            return {"raised": str(error), "busy": engine.busy()}
        return {"raised": ""}

    def greedy(self) -> Mapping[str, Any]:
        self.swap(15)
        engine = self.engine(samples=2, temperature=0.0)
        self.submit(engine, 4)
        rollouts, figures = self.drain(engine)[4]
        model, tokens = self.models[15 % 3], rollouts.tokens_NS[0]
        begin, length = int(rollouts.prompt_lengths_N[0]), int(rollouts.response_lengths_N[0])
        said = tokens[begin : begin + length]
        alike = []
        for step in range(length):
            given = tokens[None, : begin + step]
            with torch.no_grad():
                hidden = model(given, torch.arange(begin + step)[None])
                alike.append(int(model.logits(hidden[:, -1]).argmax()) == int(said[step]))
        return {
            "alike": all(alike),
            "logprobs": float(rollouts.logprobs_NT.abs().sum()),
            "measured": "mismatch" in figures,
        }

    def wrong(self, damage: Callable[[], Callable[[], None]]) -> Mapping[str, Any]:
        """Swap the weights, but leave some of vLLM's as they were."""
        undo = damage()
        engine = self.engine(samples=4)
        self.swap(self.behaviour.version + 1)
        self.submit(engine, 5)
        try:
            self.drain(engine)
        except UntrustedError as error:
            engine.reset()
            return {"raised": str(error), "busy": engine.busy()}
        finally:
            undo()
        return {"raised": ""}


def without_packing() -> Callable[[], None]:
    """Do not pack a tied head, as vLLM itself does not."""
    kept = vllm_weights.pack_tied_head
    vllm_weights.pack_tied_head = lambda head: None
    return lambda: setattr(vllm_weights, "pack_tied_head", kept)


def without_a_tensor(name: str) -> Callable[[], Callable[[], None]]:
    """Load the old values of one tensor in place of the new ones."""

    def damage() -> Callable[[], None]:
        kept = vllm_weights.LinkedWeights.receive_weights
        old: dict[str, torch.Tensor] = {}

        def receive(self: Any, info: Any) -> None:
            old.setdefault(name, torch.flip(info.tensors[name], [0]))
            kept(self, replace(info, tensors={**info.tensors, **old}))

        setattr(vllm_weights.LinkedWeights, "receive_weights", receive)  # noqa: B010
        return lambda: setattr(vllm_weights.LinkedWeights, "receive_weights", kept)

    return damage


def found_by(folder: Path, kind: str, ranks: int, rank: int) -> Mapping[str, Any]:
    if ranks > 1:
        dist.init_process_group("gloo", f"file://{folder}/store", timedelta(seconds=120), world_size=ranks, rank=rank)
    cases = Cases(folder, kind == "tied", ranks, rank)
    found: dict[str, Any] = {"swapped_within": cases.swapped_within()}
    if kind == "tied":
        found["wrong head"] = cases.wrong(without_packing)
    elif ranks == 1:
        every = (
            cases.paused,
            cases.turns,
            cases.stopped,
            cases.given_up,
            cases.greedy,
            cases.few_tokens,
            cases.many_slots,
            cases.too_many_slots,
        )
        found |= {case.__name__: case() for case in every}
    for name in ("self_attn.k_proj", "mlp.down_proj", "input_layernorm") if kind != "tied" else ():
        found[f"wrong {name}"] = cases.wrong(without_a_tensor(f"model.layers.1.{name}.weight"))
    return found


def be_rank(folder: Path, kind: str, rank: int) -> None:
    status = 1
    try:
        (folder / f"{rank}.json").write_text(json.dumps(found_by(folder, kind, KINDS[kind], rank)))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def main(folder: Path) -> None:
    for kind, ranks in KINDS.items():
        (folder / kind).mkdir()
        pids = list[int]()
        for rank in range(ranks):
            if (pid := os.fork()) == 0:
                be_rank(folder / kind, kind, rank)
            pids.append(pid)
        statuses = [os.waitpid(pid, 0)[1] for pid in pids]
        if any(statuses):
            sys.exit(f"{kind}: a rank has failed")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Reference passes of small decoders: an engine's steps, an update's forward and backward, an optimizer's step.

What these take beyond their matrix products is what the cost model has constants for: launches, element-wise work,
reading the cache, attention. The shapes differ in width, depth, rows and lengths, so that the constants can be told
apart.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import torch

from penstock.graph.types import Context, Prompts, Weights
from penstock.nodes.calibrate.clock import seconds
from penstock.nodes.generate.engine import Engine
from penstock.nodes.generate.sampling import Sampler
from penstock.nodes.learn.packing import Packed, pack
from penstock.nodes.model import Llama, ModelConfig
from penstock.nodes.policy import LanguagePolicy, Step
from penstock.nodes.tokenizer import Tokenizer, byte_tokenizer

HEAD = 64
"""Width of a head."""


@dataclass(frozen=True)
class Reference:
    """A decoder's sizes with `rows` sequences of `tokens` tokens. In decoding: slots, and the longest response."""

    hidden: int
    layers: int
    rows: int
    tokens: int

    @property
    def facts(self) -> dict[str, Any]:
        """What the cost model needs to know of it: the names of `Shape`."""
        config = self.config
        sizes = {"vocab": config.vocab_size, "heads": config.num_attention_heads, "inner": config.intermediate_size}
        return {**asdict(self), **sizes, "head_dim": HEAD}

    @property
    def config(self) -> ModelConfig:
        tokenizer = byte_tokenizer()
        return ModelConfig(
            vocab_size=tokenizer.vocab_size,
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 8 // 3 // 32 * 32,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // HEAD,
            num_key_value_heads=self.hidden // HEAD,
            head_dim=HEAD,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            eos_token_ids=tokenizer.stops,
            pad_token_id=tokenizer.pad,
        )


DECODES = (
    Reference(192, 2, 64, 72), Reference(192, 4, 128, 72), Reference(384, 2, 128, 40), Reference(640, 2, 64, 24),
)  # fmt: skip
TRAINS = (
    Reference(192, 2, 32, 64), Reference(192, 4, 32, 64), Reference(192, 2, 8, 256), Reference(384, 2, 32, 64),
    Reference(640, 2, 32, 64),
)  # fmt: skip
OPTIMIZED = (Reference(192, 2, 1, 2), Reference(384, 4, 1, 2), Reference(640, 6, 1, 2))
PROMPT = "0123456"
SKIPPED = 4
"""Steps after the prompts that are not timed."""


def decode_steps(reference: Reference, dtype: str, device: str, threads: int) -> dict[str, Any]:
    """Seconds of an engine's steps, each with the farthest position that it sees."""
    tokenizer = byte_tokenizer()
    tokenizer.stops = ()  # every response is as long as it may be
    context = _context(reference, dtype, device, threads)
    model = _model(reference, context)
    engine = Engine(model, tokenizer, context, Sampler(), samples=reference.rows)
    weights = Weights(0, {name: p.detach() for name, p in model.named_parameters()})
    engine.submit("reference", {"prompts": Prompts((0,), (PROMPT,), ("",)), "behaviour": weights})
    steps: list[tuple[int, float]] = []
    while engine.busy():
        reach, began = int(engine.slots.positions.max()) + 1, time.perf_counter()
        engine.step()
        steps.append((reach, time.perf_counter() - began))
    # The last step also gives the group away, and measures its mismatch.
    return {**reference.facts, "steps": _thinned(steps[SKIPPED:-1])}


def _thinned(steps: Sequence[tuple[int, float]], each: int = 4) -> list[tuple[float, float]]:
    """The means of every few steps."""
    parts = [steps[begin : begin + each] for begin in range(0, len(steps) - each + 1, each)]
    return [(fmean(r for r, _ in part), fmean(s for _, s in part)) for part in parts]


def training_step(reference: Reference, dtype: str, device: str, threads: int, least: float = 0.1) -> dict[str, Any]:
    """Seconds of forward and backward of a micro-batch on each lane at once."""
    policy = trainer(reference, dtype, device, threads)
    lanes = policy.workers.count
    work = training_work(policy, reference, lanes)
    return {**reference.facts, "lanes": lanes, "seconds": seconds(work, least)}


def training_work(policy: LanguagePolicy, reference: Reference, micro_batches: int) -> Callable[[], None]:
    """Forward and backward of equal micro-batches, at each call."""
    packed = _micro_batches(reference, micro_batches)

    def loss(_: Packed, logprobs_P: torch.Tensor, entropy_P: torch.Tensor) -> tuple[torch.Tensor, float]:
        return -logprobs_P.sum(), float(entropy_P.sum())

    def work() -> None:
        policy.accumulate(packed, loss)
        policy.optimizer.zero_grad()

    return work


def optimizer_step(reference: Reference, dtype: str, device: str, threads: int) -> dict[str, Any]:
    """Seconds of clipping, AdamW and copying the weights, beyond their parameters' number."""
    policy = trainer(reference, dtype, device, threads)
    step = Step(1e-6, 1.0, (0.9, 0.95), 0.0)
    gradients = {name: torch.ones_like(p) for name, p in policy.masters.items()}

    def work() -> None:
        for name, master in policy.masters.items():
            master.grad = gradients[name]
        policy.apply(step, normaliser=1.0)

    taken = seconds(work)
    return {"parameters": sum(p.numel() for p in policy.masters.values()), "seconds": taken}


def _context(reference: Reference, dtype: str, device: str, threads: int) -> Context:
    slots = reference.rows
    return Context(dtype=dtype, device=device, threads=threads, slots=slots, max_tokens=reference.tokens)


def _model(reference: Reference, context: Context) -> Llama:
    model = Llama(reference.config, getattr(torch, context.dtype), context.device)
    model.init_weights(0)
    return model


def trainer(reference: Reference, dtype: str, device: str, threads: int) -> LanguagePolicy:
    context = _context(reference, dtype, device, threads)
    master = Llama(reference.config, torch.float32, device)
    master.init_weights(0)
    tokenizer: Tokenizer = byte_tokenizer()
    return LanguagePolicy(master, tokenizer, context)


def _micro_batches(reference: Reference, count: int) -> list[Packed]:
    """Prompts of 8 tokens; all of one length."""
    rows = reference.rows * count
    generator = torch.Generator().manual_seed(0)
    tokens_NS = torch.randint(256, (rows, reference.tokens + 1), generator=generator)
    prompts_N, responses_N = torch.full((rows,), 8), torch.full((rows,), reference.tokens - 7)
    return pack(tokens_NS, prompts_N, responses_N, reference.rows * reference.tokens)

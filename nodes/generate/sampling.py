"""From logits to tokens: keyed uniforms, one inverse-CDF draw per token, and which distributions can be trained on.

Randomness is a function of (key, position), never drawn from a stream, so that a token depends neither on timing nor on
its neighbours. `mismatch` measures how far the generator's log-probabilities are from the trainer's at equal weights.

Shapes: S rows, V vocabulary, N rollouts, T positions of a response, P packed tokens.
"""

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.graph.errors import Fault, GraphError
from penstock.graph.imports import path_of
from penstock.graph.requires import Call
from penstock.graph.types import Logprobs, Policy, Rollouts
from penstock.nodes.learn.batching import behaviour_logprobs, pack, sampled_mask
from penstock.nodes.learn.logprobs import packed_logprobs
from penstock.nodes.model import CausalLM, invariant
from penstock.nodes.model.compiled import compiled_or_warned

# splitmix64 (Steele, Lea and Flood 2014), as signed 64-bit numbers; torch's int64 wraps around.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_SOURCE = Path(__file__).with_name("sampling.c")
WORDS = 512
"""Words of a block whose mass is summed first; down to an eighth of it, if the vocabulary is a multiple of that."""


def keyed_uniform(keys: Tensor, positions: Tensor) -> Tensor:
    """A float64 number in [0, 1 − 2⁻⁵²] for each pair of int64 key and position, which broadcast.

    It is the (position + 1)-th output of the splitmix64 generator whose seed is the key.
    """
    bits = keys + (positions + 1) * _STEP
    bits = (bits ^ _shift(bits, 30)) * _MIX_1
    bits = (bits ^ _shift(bits, 27)) * _MIX_2
    bits = bits ^ _shift(bits, 31)
    return _shift(bits, 12).double() * 2.0**-52


def _shift(bits: Tensor, by: int) -> Tensor:
    """Shift right, filled with zeros: torch's own shift keeps the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


@dataclass(frozen=True)
class Sampler:
    """The distribution that is sampled from: softmax(logits / temperature), cut to the `top_k` likeliest tokens and
    those as likely as the last of them, as in transformers, then to the fewest that hold `top_p` of the probability,
    and renormalised. `top_k` 0 and `top_p` 1 cut nothing.

    Temperature 0 takes the likeliest token, with probability 1.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def cuts(self) -> bool:
        return self.top_k > 0 or self.top_p < 1

    @property
    def plain(self) -> bool:
        """True if tokens are drawn from softmax(logits / temperature) itself, as `sampling.c` does."""
        return self.temperature > 0 and not self.cuts

    def __call__(self, logits_SV: Tensor, uniform_S: Tensor, by_rows: bool = False) -> tuple[Tensor, Tensor]:
        """Tokens (int64 [S]) and their log-probabilities (float32 [S], nats) in the distribution sampled from; with
        `by_rows` computed as a trainer does with `--invariant`."""
        if self.temperature == 0:
            tokens_S = logits_SV.argmax(-1)
            return tokens_S, torch.zeros_like(tokens_S, dtype=torch.float32)
        draw = compiled(logits_SV.dtype) if self.plain and not by_rows and logits_SV.device.type == "cpu" else None
        if draw is not None:
            logits_SV, uniform_S = logits_SV.contiguous(), uniform_S.contiguous()
            rows, words = logits_SV.shape
            tokens_S, logprobs_S = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
            made = self.temperature, tokens_S.data_ptr(), logprobs_S.data_ptr(), torch.get_num_threads()
            if draw(logits_SV.data_ptr(), uniform_S.data_ptr(), rows, words, *made):
                raise MemoryError(f"generate: no memory for the sums of {words} words")
            return tokens_S, logprobs_S
        if by_rows and not self.cuts:
            temperature_S = torch.full((len(logits_SV),), self.temperature)
            logprobs_SV = invariant.log_softmax(logits_SV, temperature_S)
        else:
            logprobs_SV = self.logprobs(logits_SV)
        tokens_S1 = _drawn(logprobs_SV.exp(), uniform_S[:, None])
        return tokens_S1.squeeze(1), logprobs_SV.gather(1, tokens_S1).squeeze(1)

    def logprobs(self, logits_SV: Tensor) -> Tensor:
        """Log-probabilities of every token, float32; −∞ where a token is cut."""
        if self.temperature != 1:
            logits_SV = logits_SV.float() / self.temperature
        if 0 < self.top_k < logits_SV.shape[-1]:
            least_S1 = logits_SV.topk(self.top_k).values[:, -1:]
            logits_SV = logits_SV.masked_fill(logits_SV < least_S1, -torch.inf)
        if self.top_p < 1:
            sorted_SV, order_SV = logits_SV.sort(dim=-1, descending=True, stable=True)
            probs_SV = sorted_SV.softmax(-1, dtype=torch.float64)
            # A token is kept if the likelier ones hold less than `top_p`: the last one kept is that which reaches it.
            before_SV = probs_SV.cumsum(-1) - probs_SV
            sorted_SV = sorted_SV.masked_fill(before_SV >= self.top_p, -torch.inf)
            logits_SV = torch.empty_like(logits_SV).scatter_(1, order_SV, sorted_SV)
        return torch.log_softmax(logits_SV, dim=-1, dtype=torch.float32)


@functools.cache
def compiled(dtype: torch.dtype) -> Callable[..., int] | None:
    """`draw` of sampling.c, for a distribution that is not cut (152 thousand words, 64 rows: 6 ms on a core, against 28
    by torch's operations). None for another dtype, or with a warning if it does not compile."""
    library = compiled_or_warned(_SOURCE, dtype)
    if library is None:
        return None
    function, pointer, number = library.draw, ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [*[pointer] * 2, *[number] * 2, ctypes.c_float, *[pointer] * 2, ctypes.c_int]
    function.restype = ctypes.c_int
    return function


def _drawn(probs_SV: Tensor, uniform_S1: Tensor) -> Tensor:
    """The token [S, 1] of each row whose share of the mass contains its uniform. The block of words is found first,
    since sums over a large vocabulary take most of a draw's time."""
    rows, words = probs_SV.shape
    even = gcd(words, WORDS)
    width = even if even >= WORDS // 8 else WORDS
    blocks = -(-words // width)
    if blocks * width > words:
        probs_SV = F.pad(probs_SV, (0, blocks * width - words))
    probs_SBW = probs_SV.view(rows, blocks, width)
    # In float64: in float32, rounding over a large vocabulary would move draws to other tokens.
    mass_SB = probs_SBW.sum(-1).cumsum(-1, dtype=torch.float64)
    # A uniform below 1 gives a target below the last entry, so the block has mass, and so has the token. For NaN logits
    # neither is found; then `EngineSlots.record` raises if the slot is held.
    target_S1 = uniform_S1 * mass_SB[:, -1:]
    block_S1 = torch.searchsorted(mass_SB, target_S1, right=True).clamp_(max=blocks - 1)
    own_SW = probs_SBW.gather(1, block_S1[:, :, None].expand(rows, 1, width))[:, 0]
    within_SW = own_SW.cumsum(-1, dtype=torch.float64)
    before_S1 = F.pad(mass_SB, (1, 0)).gather(1, block_S1)
    # By rounding, the sum of a block may be less here than in `mass_SB`.
    left_S1 = torch.minimum(target_S1 - before_S1, within_SW[:, -1:] * (1 - 2.0**-52))
    tokens_S1 = block_S1 * width + torch.searchsorted(within_SW, left_S1, right=True)
    return tokens_S1.clamp_(max=words - 1)


def scorable(call: Call) -> None:
    """Requirement of a node that samples: nodes that score its samples can do so.

    The temperature is stored with the rollouts, and each node that scores them applies it. Two kinds of samples cannot
    be scored by an update of a policy or for log-probabilities: those of temperature 0, and those of top-k or top-p.
    Rollouts of which only rewards are used may be of either kind. Outputs of a node that reads several rollouts are not
    checked here: the update checks the rows themselves (`LanguageModel.pack`).

    Raises GraphError with the readers that would score such samples.
    """
    # A cut distribution has another support than the policy that learns. With the policy's own cut, tokens would get a
    # ratio of 0 or a log-probability of −∞; the sampler's cut would have to be sent along, V bits or up to V ids for
    # each token (16 kB for a vocabulary of 128k), in every buffer, message and checkpoint.
    whole = "all of the vocabulary (top_k=0, top_p=1): a policy that has changed has another support"
    greedy = "more than 0: greedy tokens have probability 1, and no gradient"
    options = call.options
    top_k, top_p = options.get("top_k"), options.get("top_p")
    # Other requirements report an option that is not a number.
    kinds = {
        "temperature": (options.get("temperature") == 0, greedy),
        "top_k": (type(top_k) is int and top_k > 0, whole),
        "top_p": (type(top_p) is float and 0 < top_p < 1, whole),
    }
    lacks = {name: needed for name, (unscored, needed) in kinds.items() if unscored}
    if not lacks:
        return
    makes = {path_of(Policy), path_of(Logprobs)}
    scorers = [
        f"{node.name} ({node.where})"
        for node in call.readers(Rollouts, sure=True)
        if any(call.view.bases.get(output.type, {output.type}) & makes for output in node.outputs)
    ]
    if scorers:
        said = f"of rollouts that are scored by {', '.join(scorers)}"
        raise GraphError(
            *(
                Fault("unscored-sampling", f"{call.what}: option {n!r}", f"{options[n]}, {said}", lack, call.node.where)
                for n, lack in lacks.items()
            )
        )


MICRO_TOKENS = 8192
# The largest mean difference in nats between log-probabilities of generator and trainer that a dtype's rounding
# explains. Beyond it our engine, which computes with the proved weights, warns; another engine stops the run.
MOST_MISMATCH = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}


@torch.no_grad()
def mismatch(model: CausalLM, rollouts: Rollouts, version: int | None = None) -> float:
    """Mean |log μ recorded − log π of the trainer's packed forward, at the same temperature| in nats, over sampled
    tokens, or only those of `version` if it is given.

    `model` must hold the weights that sampled these tokens: across versions the difference is drift, not mismatch.
    Raises ValueError for rollouts without log μ.
    """
    recorded_NT, total = behaviour_logprobs(rollouts, "mismatch").to(model.device), 0.0
    counted_NT = sampled_mask(rollouts)
    if version is not None:
        counted_NT = counted_NT & (rollouts.versions_NT == version)
    weight_NT = counted_NT.to(model.device)
    for packed in pack(rollouts, MICRO_TOKENS, device=model.device):
        logprobs_P, _ = packed_logprobs(model, packed)
        at = packed.sequence_P, packed.step_P
        total += float(((logprobs_P - recorded_NT[at]).abs() * weight_NT[at]).sum())
    return total / int(counted_NT.sum())

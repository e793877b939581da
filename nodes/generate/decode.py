"""A pass of a model's layers over rows that are each one token of some slot, and the draw of the next tokens, as one
call of C (`decode.c`): on a CPU, calling the operations of a step one by one takes as long as a small model's
computation, and longer if a large one's weights have displaced their code from the processor's caches.

Its products use weights in a layout of their own, which are copied for each version; norms, rotary positions and
attention are those of the other files. It rounds where the model's operations round, so that log-probabilities differ
from a trainer's only by the order of sums. A row's bits depend only on its own numbers. Weights of layers in int8 stay
so: their products are those of `eight_bit.product`, to the bit.

Shapes: R rows, D hidden width, V vocabulary.
"""

import ctypes
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.nodes.generate import attention, sampling
from penstock.nodes.generate.kv_cache import Cache, zeros
from penstock.nodes.model import CausalLM, elementwise
from penstock.nodes.model.compiled import compiled_or_warned
from penstock.nodes.model.kernels import Linear

_SOURCE = Path(__file__).with_name("decode.c")
_POINTER, _NUMBER, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
# A layer's tensors, in the order of decode.c.
_PARTS = ("norm", "qkv", "qkv_bias", "q_norm", "k_norm", "o", "o_norm", "mlp_norm", "gate_up", "down", "down_norm")
# The most tables of rotary positions of a model.
_ROPES = 2
_LINE = 64


class _Model(ctypes.Structure):
    """`struct model` of decode.c."""

    _fields_ = (
        *((name, _POINTER) for name in ("rms_norm", "rotate", "attend", "draw")),
        *((name, _POINTER) for name in ("weights", "words", "norm", "head")),
        *((name, _POINTER * _ROPES) for name in ("cos", "sin")),
        *((name, _POINTER) for name in ("windows", "ropes")),
        ("at", _NUMBER * len(_PARTS)),
        *((name, _NUMBER) for name in ("layer_size", "layers", "V", "D", "H", "G", "K", "I", "activation", "is_int8")),
        *((name, ctypes.c_float) for name in ("eps", "offset", "scale")),
    )


class DecodePass:
    """The passes of a model's generator, with copies of its weights from the last call of `pack`."""

    @staticmethod
    def of(model: CausalLM) -> "DecodePass | None":
        """The passes of a model; None for a model that `decode.c` does not support, without AVX2 (for int8: VNNI), or
        without a C compiler."""
        config, dtype = model.config, model.dtype
        # A rank's part of a model, adapters and experts have operations of their own.
        plain = type(model) is CausalLM and model.lora is None and not config.family.experts and not model.invariant
        if not plain or model.device.type != "cpu":
            return None
        attend = attention.compiled(config.num_attention_heads // config.num_key_value_heads, config.head_dim, dtype)
        others = elementwise.functions, sampling.compiled, _functions
        if attend is None or any(of(dtype) is None for of in others):
            return None
        formats = {module.weight.dtype for module in model.model.layers.modules() if isinstance(module, Linear)}
        int8 = {torch.int8} if _INT.in_dll(_functions(dtype), "int8_products").value else set()
        return DecodePass(model) if formats in ({dtype}, int8) else None

    def __init__(self, model: CausalLM) -> None:
        config, dtype = model.config, model.dtype
        self.model, self.functions = model, _functions(dtype)
        is_int8 = any(each.dtype == torch.int8 for each in model.model.layers.parameters())
        heads, groups, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        hidden, inner, vocabulary = config.hidden_size, config.intermediate_size, config.vocab_size
        size = functools.partial(self._packed_size, is_int8=is_int8)
        qkv = (heads + 2 * groups) * width
        family = config.family
        bias, normed, branch = family.qkv_bias * qkv, family.qk_norm * width, family.branch_norms * hidden
        sizes = (
            *(hidden, size(qkv, hidden), bias, normed, normed, size(hidden, heads * width), branch),
            *(hidden, size(2 * -(-inner // 16) * 16, hidden), size(hidden, inner), branch),
        )
        at, end = [], 0
        for each in sizes:
            at.append(end if each else -1)
            end += -(-each // _LINE) * _LINE
        self.at = dict(zip(_PARTS, at, strict=True))
        layers = range(config.num_hidden_layers)
        self.windows, self.ropes = (
            torch.tensor([of(layer) for layer in layers], dtype=torch.int64)
            for of in (config.window_of, config.rope_of)
        )
        self.weights: Tensor | None = None
        self.working = torch.empty(0, dtype=dtype)
        others: Any = elementwise.functions(dtype)
        attend: Any = attention.compiled(heads // groups, width, dtype)
        called: list[Any] = [others.rms_norm, others.rotate, attend, sampling.compiled(dtype)]
        self.given = _Model(
            *(ctypes.cast(each, _POINTER).value for each in called),
            windows=self.windows.data_ptr(),
            ropes=self.ropes.data_ptr(),
            at=(_NUMBER * len(at))(*at),
            layer_size=end,
            layers=config.num_hidden_layers,
            V=vocabulary,
            D=hidden,
            H=heads,
            G=groups,
            K=width,
            I=inner,
            activation=[*elementwise.ACTIVATIONS].index(family.activation),
            is_int8=is_int8,
            eps=config.rms_norm_eps,
            offset=family.norm_offset,
            scale=float(model.model.embed_tokens.factor(dtype)),
        )

    def pack(self) -> None:
        """Copy the model's present weights, to compute with them from now on."""
        model, given = self.model, self.given
        if self.weights is None:
            self.weights = zeros((given.layers, given.layer_size), model.dtype)
            self.head = zeros((self._packed_size(given.V, given.D),), model.dtype)
            given.weights, given.head = self.weights.data_ptr(), self.head.data_ptr()
        layers: Any = model.model.layers.values()
        for of, layer in zip(self.weights, layers, strict=True):
            heads, mlp = layer.self_attn, layer.mlp
            own, after = layer.input_layernorm, layer.post_attention_layernorm
            vectors = {"norm": [own.weight], "mlp_norm": [after.weight]}
            if layer.branch_norms:
                before, last = layer.pre_feedforward_layernorm, layer.post_feedforward_layernorm
                vectors |= {"o_norm": [after.weight], "mlp_norm": [before.weight], "down_norm": [last.weight]}
            maps = heads.q_proj, heads.k_proj, heads.v_proj
            if maps[0].bias is not None:
                vectors["qkv_bias"] = [each.bias for each in maps]
            if self.at["q_norm"] >= 0:
                vectors |= {"q_norm": [heads.q_norm.weight], "k_norm": [heads.k_norm.weight]}
            for name, parts in vectors.items():
                joined = torch.cat([part.detach() for part in parts])
                of[self.at[name] : self.at[name] + len(joined)] = joined
            self._pack(of[self.at["qkv"] :], maps)
            self._pack(of[self.at["o"] :], (heads.o_proj,))
            self._pack(of[self.at["gate_up"] :], (mlp.gate_proj, mlp.up_proj), gated=True)
            self._pack(of[self.at["down"] :], (mlp.down_proj,))
        words = model.model.embed_tokens.weight.detach().contiguous()
        head = words if model.lm_head is None else model.lm_head.weight
        self._pack_one(self.head, head)
        norm = model.get_parameter("model.norm.weight").detach().contiguous()
        tables = [(cos.contiguous(), sin.contiguous()) for cos, sin in model.tables]
        self.kept = words, norm, tables
        given.words, given.norm = words.data_ptr(), norm.data_ptr()
        for number, (cos, sin) in enumerate(tables):
            given.cos[number], given.sin[number] = cos.data_ptr(), sin.data_ptr()

    def copied_bytes(self) -> int:
        """The bytes of the copies that `pack` makes."""
        given = self.given
        elements = given.layers * given.layer_size + self._packed_size(given.V, given.D)
        return int(elements * self.model.dtype.itemsize)

    def _packed_size(self, outputs: int, inputs: int, is_int8: bool = False) -> int:
        return int(self.functions.packed_size(outputs, inputs, is_int8))

    def _pack(self, to: Tensor, maps: Sequence[Any], gated: bool = False) -> None:
        at = 0
        for each in maps:
            self._pack_one(to, each.weight, each.row_scales, at, gated)
            at += 16 if gated else each.out_features

    def _pack_one(
        self, to: Tensor, weight: Tensor, scales: Tensor | None = None, at: int = 0, gated: bool = False
    ) -> None:
        outputs, inputs = weight.shape
        kept = weight.detach().contiguous(), None if scales is None else scales.detach().contiguous()
        found = (None if each is None else each.data_ptr() for each in kept)
        self.functions.pack(*found, to.data_ptr(), outputs, inputs, at, gated, torch.get_num_threads())

    def hidden(self, inputs_3R: NDArray[np.int64], cache: Cache) -> Tensor:
        """Hidden states after the final norm, [R, D]. `inputs_3R` has each row's token, slot and position; earlier
        tokens of these slots are in `cache` or in this pass."""
        rows = inputs_3R.shape[1]
        out_RD = torch.empty(rows, self.given.D, dtype=self.model.dtype)
        assert inputs_3R.flags.c_contiguous
        rows_at = tuple(each.ctypes.data for each in inputs_3R)
        memory = self._working(rows), out_RD.data_ptr(), torch.get_num_threads()
        if self.functions.decode(ctypes.byref(self.given), *rows_at, rows, *self._cached(cache), *memory):
            raise MemoryError(f"generate: no memory for a pass of {rows} rows")
        return out_RD

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Unnormalised log-probabilities of the next token, [R, V]."""
        assert hidden_RD.is_contiguous()
        rows = len(hidden_RD)
        out_RV = torch.empty(rows, self.given.V, dtype=hidden_RD.dtype)
        memory = self._working(rows), out_RV.data_ptr(), torch.get_num_threads()
        self.functions.logits(ctypes.byref(self.given), hidden_RD.data_ptr(), rows, *memory)
        return out_RV

    def sample(
        self, inputs_4R: NDArray[np.int64], count: int, cache: Cache, uniform_ST: Tensor, temperature: float
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The next tokens of the first `count` rows and their log-probabilities, as a `plain` sampler makes them of
        `logits`. `inputs_4R` has each row's token, slot, position and the number of the next token in its response,
        whose draw (float64) is in `uniform_ST`."""
        rows, steps = inputs_4R.shape[1], uniform_ST.shape[1]
        assert inputs_4R.flags.c_contiguous
        assert uniform_ST.is_contiguous()
        tokens_N, logprobs_N = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.float32)
        given = inputs_4R.ctypes.data, rows, count, *self._cached(cache), uniform_ST.data_ptr(), steps, temperature
        made = self._working(rows, count), tokens_N.ctypes.data, logprobs_N.ctypes.data, torch.get_num_threads()
        if self.functions.sample(ctypes.byref(self.given), *given, *made):
            raise MemoryError(f"generate: no memory for a pass of {rows} rows")
        return tokens_N, logprobs_N

    def _cached(self, cache: Cache) -> tuple[int, ...]:
        """The addresses of the cache, the elements of a layer, and the pages of a slot."""
        keys, values = cache.keys, cache.values
        assert keys.is_contiguous()
        assert values.is_contiguous()
        return keys.data_ptr(), values.data_ptr(), math.prod(keys.shape[1:]), keys.shape[2]

    def _working(self, rows: int, drawn: int = 0) -> int:
        """The address of memory for a pass over this many rows, of which so many are drawn for."""
        needed = self.functions.working_size(ctypes.byref(self.given), rows, drawn)
        if len(self.working) < needed:
            self.release()  # before there is more
            self.working = zeros((needed,), self.working.dtype)
        return self.working.data_ptr()

    def release(self) -> None:
        """Free the memory of passes, of which logits are the most."""
        self.working = self.working.new_empty(0)


@functools.cache
def _functions(dtype: torch.dtype) -> Any:
    """The functions of decode.c; None for another dtype, on a processor without AVX2, or with a warning if they do not
    compile."""
    found = compiled_or_warned(_SOURCE, dtype)
    if found is None or not _INT.in_dll(found, "fast").value:
        return None
    found.packed_size.argtypes, found.packed_size.restype = [_NUMBER, _NUMBER, _INT], _NUMBER
    found.pack.argtypes, found.pack.restype = [_POINTER] * 3 + [_NUMBER] * 3 + [_INT] * 2, None
    found.working_size.argtypes, found.working_size.restype = [_POINTER, _NUMBER, _NUMBER], _NUMBER
    cached = _POINTER, _POINTER, _NUMBER, _NUMBER
    found.decode.argtypes = [*[_POINTER] * 4, _NUMBER, *cached, *[_POINTER] * 2, _INT]
    found.logits.argtypes = [*[_POINTER] * 2, _NUMBER, *[_POINTER] * 2, _INT]
    found.logits.restype = None
    draws = _POINTER, _NUMBER, ctypes.c_float
    found.sample.argtypes = [*[_POINTER] * 2, _NUMBER, _NUMBER, *cached, *draws, *[_POINTER] * 3, _INT]
    return found

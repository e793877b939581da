"""What a node gets beside its inputs: the settings of the run, keys for randomness, and the origin of its weights."""

import hashlib
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from penstock.graph.protocols import Axes


@dataclass(frozen=True)
class Context:
    """The settings of a run, as every `maker` and `init` gets them. They can be written as JSON.

    Attributes:
        node: the node or argument that is being made.
        seed: the run's seed.
        model: the model directory; "" is a small untrained model.
        data: the data set that `--data` names.
        data_split: the split of it; "" is "train", or the only one.
        eval_data: the data that accuracy is measured on; "" is a part of `data` that training never sees.
        eval_split: the split of `eval_data`, or else of `data`.
        held_out: prompts of rows that training never sees; None is a tenth, 500 at most, if accuracy is measured on
            `data`.
        prompt_field: the field of a row that is the prompt, "" for the usual one.
        answer_field: the field that is the answer, "" for the usual one, "none" where rows have none.
        row: import path of a function that makes the fields of each row, "" for none.
        system: system message before each prompt, "" for none.
        chat_template_kwargs: variables of the chat template, each as NAME=VALUE.
        dtype: format of the model that computes.
        device: device of this rank.
        max_tokens: the longest response, in tokens.
        max_prompt: the longest prompt, or conversation before its last turn, in tokens.
        segment: tokens after which a response pauses; 0 is never.
        batch: prompt groups per update.
        updates: updates of the run.
        lr_warmup: updates over which learning rates rise; None leaves it to the program.
        lr_decay: how learning rates fall, "constant", "linear" or "cosine"; "" leaves it to the program.
        slots: rows that a generator decodes at once.
        engine: the engine of generators that name no other, "penstock" or "vllm".
        mismatch_limit: the largest mean difference of another engine's log-probabilities to the trainer's, in nats,
            that a run accepts; None chooses it by the format.
        versions: "pinned" if groups use exactly the version of their update, so that a run is repeatable.
        deterministic: True if everything must be computed in an order that never varies.
        split: "train"; "evaluate", the part of `data` that training never sees; or "whole", all of it in turn.
        threads: threads of this rank.
        recompute: "layer" computes activations within a layer again for the backward pass, and does not keep them.
        micro_tokens: most tokens of a micro-batch, padding included; 0 chooses by the device.
        logit_elements: most logits in memory at once; 0 chooses by the device.
        zero: what "fsdp" keeps sharded: 3 weights and gradients, too; 1 only the optimizer's state and master weights.
        optimizer_state: where AdamW's moments are between two steps: on the "device", or on the "host".
        invariant: True if a generator's log-probabilities must equal the trainer's to the bit.
        replay_routing: True if generators record the experts of each token, and policies use the same ones.
        lora: rank of the adapters that a policy learns in place of all weights; 0 is none.
        lora_alpha: alpha of the adapters; None is twice the rank.
        lora_targets: names of the linear maps that have an adapter; () is all of a layer's.
        mesh: axes of the ranks that run this pool together, as (axis, size), outermost first, row-major; () for one
            rank. With more than one rank, torch.distributed's default group has them all.
        rank: this rank's place in the mesh.
        host_ranks: how many of these ranks are on this one's host.
        options: the options of the node, or the program's for a maker.
        weights: for each input that is weights, the carried value that they belong to.
    """

    node: str = ""
    seed: int = 0
    model: str = ""
    data: str = ""
    data_split: str = ""
    eval_data: str = ""
    eval_split: str = ""
    held_out: int | None = None
    prompt_field: str = ""
    answer_field: str = ""
    row: str = ""
    system: str = ""
    chat_template_kwargs: tuple[str, ...] = ()
    dtype: str = "float32"
    device: str = "cpu"
    max_tokens: int = 16
    max_prompt: int = 2048
    segment: int = 0
    batch: int = 32
    updates: int = 100
    lr_warmup: int | None = None
    lr_decay: str = ""
    slots: int = 256
    engine: str = "penstock"
    mismatch_limit: float | None = None
    versions: str = "free"
    deterministic: bool = False
    split: str = "train"
    threads: int = 1
    recompute: str = "none"
    micro_tokens: int = 0
    logit_elements: int = 0
    zero: int = 3
    optimizer_state: str = "device"
    invariant: bool = False
    replay_routing: bool = False
    lora: int = 0
    lora_alpha: float | None = None
    lora_targets: tuple[str, ...] = ()
    mesh: Axes = ()
    rank: int = 0
    host_ranks: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    weights: "dict[str, Origin]" = field(default_factory=dict)

    def key(self, *parts: str | int) -> int:
        """A 63-bit key for this node's randomness: a pure function of seed, node and `parts`."""
        return random_key(self.seed, self.node, *parts)

    @property
    def _evaluated(self) -> tuple[str, str]:
        """The data that accuracy is measured on, and its split."""
        return self.eval_data or self.data, self.eval_split or ("" if self.eval_data else self.data_split)

    @property
    def apart(self) -> bool:
        """True if accuracy is measured on data of its own. If not, a part of `data` is held out for it."""
        return self._evaluated != (self.data, self.data_split)

    def evaluation(self) -> "Context":
        """The context of a source of the data that accuracy is measured on."""
        if not self.apart:
            return replace(self, split="evaluate")
        data, data_split = self._evaluated
        own = replace(self, data=data, data_split=data_split, eval_data="", eval_split="")
        return replace(own, split="whole", held_out=None)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Origin:
    """The carried value that weights belong to.

    Attributes:
        maker: import path of the value's maker.
        context: the context that the maker gets, except for where it runs.
        precision: the format that `broadcast` sends them in, "" for the model's own.
        wire: the format in which they travel without a precision (`--wire`), "" for the model's own.
    """

    maker: str
    context: Context
    precision: str = ""
    wire: str = ""

    def exact(self, dtype: str) -> bool:
        """True if weights of this dtype arrive with the bits that they have."""
        return not self.precision and not rounds(self.wire, dtype)


def rounds(wire: str, dtype: str) -> bool:
    """True if the format `wire` (of `--wire`) does not keep the bits of weights of this dtype."""
    return wire not in ("", dtype)


def problems_made(data: str) -> str:
    """The problems that `--data` asks to make as needed, "arithmetic" or "calculator"; "" if it names rows."""
    name = data.partition(":")[0] or "arithmetic"
    return name if name in ("arithmetic", "calculator") else ""


@dataclass(frozen=True)
class BatchPart:
    """The part of its batch that an accumulating update is called with (`NodeDef.accumulate`): `number`, from 0, of
    `count`. The last call makes the next value."""

    number: int
    count: int

    @property
    def last(self) -> bool:
        return self.number == self.count - 1


def random_key(*parts: str | int) -> int:
    """A 63-bit key for randomness: a pure function of `parts`."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1

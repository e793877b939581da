"""The models of a run: a decoder with its tokenizer (`SequenceModel`), one that never changes (`Frozen`), one with
float32 master weights (`MasterWeights`), and one that learns by AdamW (`Learner`).

Master weights are float32. If the run's dtype is another one, the model computes with a copy in that dtype. The same
numbers are broadcast, so that trainer and generator have equal weights. With several ranks each has its shards of the
masters, which are converted as they are gathered.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from penstock.graph.context import Context
from penstock.graph.machine import usable_memory_gib
from penstock.graph.protocols import STAGE, Sharding
from penstock.graph.types import NodeWarning, Rollouts
from penstock.nodes.learn.batching import MicroBatches, Packed, pack
from penstock.nodes.learn.data_parallel_threads import DataParallelThreads
from penstock.nodes.learn.optimizer import AdamW, Schedule, UpdateOptions, scheduled
from penstock.nodes.model import CausalLM, Decoder, ModelError, Scorer, save_model, torch_dtype
from penstock.nodes.model.hf import check_names, check_shape, read_adapters, save_adapters
from penstock.nodes.model.tensor_parallel import stages_of, tensor_parallel
from penstock.nodes.open_model import about_adapters
from penstock.nodes.parallel.mesh import Ranks
from penstock.nodes.tokenizer import Tokenizer

if TYPE_CHECKING:
    from penstock.nodes.parallel.fsdp import Shards


# Tokens of a micro-batch, padding included. On a CPU `CPU_MICRO_BYTES` divided by the size of an element: in bfloat16
# twice the tokens of float32 make an update of 25 million parameters 6 % shorter, since gradients are added up less
# often; in float32 more do not fit the caches. On other devices enough to fill them without too many activations.
CPU_MICRO_BYTES, MICRO_TOKENS = 8192, 16384

Model = TypeVar("Model", bound=Decoder)


class SequenceModel(Generic[Model]):
    """A model with its tokenizer. Its `workers` are several ranks that hold it in shards (`Shards`), or one rank's
    threads, which on a CPU work on micro-batches of their own (`DataParallelThreads`). `shapes` are those of the whole
    weights, or only of adapters if the model has some.
    """

    replays: ClassVar[bool] = False
    """True for the model that sampled its rollouts: their tokens may go through the experts chosen at sampling."""

    def __init__(self, model: Model, tokenizer: Tokenizer, context: Context) -> None:
        self.model, self.tokenizer, self.context = model, tokenizer, context
        self.ranks, self.dtype = Ranks.of(context), torch_dtype(context.dtype)
        self.shapes = {name: tuple(p.shape) for name, p in model.own_parameters().items()}
        usual = CPU_MICRO_BYTES // self.dtype.itemsize if model.device.type == "cpu" else MICRO_TOKENS
        self.micro_tokens = context.micro_tokens or usual
        model.replays_routing = self.replays and context.replay_routing
        model.logit_elements = context.logit_elements or model.logit_elements
        if context.recompute == "layer":
            model.recompute_layers()
        if context.invariant and isinstance(model, CausalLM):
            model.be_invariant()
        self.workers = _workers(model, self.ranks, context)

    @property
    def device(self) -> torch.device:
        return self.model.device

    def own_threads(self) -> bool:
        return self.ranks.count == 1 and self.device.type == "cpu"

    def pack(
        self,
        rollouts: Rollouts,
        max_tokens: int | None = None,
        *,
        whole_groups: bool = False,
        readers: "Sequence[SequenceModel[Any]]" = (),
    ) -> MicroBatches:
        """Micro-batches of at most `max_tokens` tokens with padding, as `batching.pack`; by default the run's.

        `readers` are other models that read them. Making a micro-batch raises ValueError if it has a token that one of
        the models has no row for.
        """

        def inspect(packed: Packed) -> None:
            for reader in (self, *readers):
                reader.require_rows(packed)

        return pack(
            rollouts,
            max_tokens or self.micro_tokens,
            multiple=self.workers.count,
            widest=self.model.config.max_position_embeddings,
            device=self.device,
            whole_groups=whole_groups,
            # On one rank only: pipeline stages pass rows on. And the chosen experts are recorded by rows.
            end_to_end=self.ranks.count == 1 and not self.model.replays_routing and self.model.takes_end_to_end,
            inspect=inspect,
        )

    def require_rows(self, packed: Packed) -> None:
        """Raises ValueError for a token that the model has no row for. Another model with this tokenizer may have more
        rows, and samples one beyond the tokenizer's words if it gives that padding a probability."""
        # On the CPU: a GPU would only report that some index is out of range, and could not be used any more.
        rows = self.model.config.vocab_size
        highest, sampled = int(packed.tokens_RW.max()), int(packed.targets_P.max())
        if (token := max(highest, sampled)) >= rows:
            model = f"{self.context.node or 'the model'} ({self.context.model or 'built for the run'})"
            given = f"rollouts with token {token}, so from a model with a vocab_size of at least {token + 1}"
            needed = f"tokens below {rows}, the vocab_size of {model}: take one with as many rows as the policy"
            raise ValueError(f"{given}, needed {needed} (its tokenizer has {self.tokenizer.vocab_size} tokens)")

    @torch.no_grad()
    def score_tokens(
        self, rollouts: Rollouts, max_tokens: int | None, forward: Callable[[Model, Packed], tuple[Tensor, Tensor]]
    ) -> Tensor:
        """The number that `forward` computes for each sampled token, float32 [N, T]; zero elsewhere."""
        micro_batches = self.pack(rollouts, max_tokens)
        values_NT = torch.zeros(rollouts.versions_NT.shape, device=self.device)
        found = self.workers.map(lambda model, packed: forward(model, packed)[0], micro_batches)
        for packed, values_P in zip(micro_batches, found, strict=True):
            values_NT[packed.sequence_P, packed.step_P] = values_P
        return values_NT.to(rollouts.versions_NT.device)

    def weights(self) -> Mapping[str, Tensor]:
        """This rank's parts, in the run's dtype."""
        return {name: p.detach().to(self.dtype) for name, p in self.own_parts().items()}

    def own_parts(self) -> dict[str, Tensor]:
        """This rank's parts of the value's own weights: adapters, or all weights."""
        return {name: p for name, p in self.workers.parameters.items() if name in self.shapes}

    def about(self) -> Mapping[str, Any]:
        """For adapters: their configuration and their base; else nothing."""
        return about_adapters(self.model.lora, self.context)

    def sharding(self) -> Sharding:
        """How the weights are sharded over the ranks."""
        config, stages = self.model.config, self.ranks.size(STAGE)
        cut = stages_of(config, self.shapes, stages) if stages > 1 else {}
        rules = tensor_parallel(config)
        return Sharding(self.ranks.mesh, self.shapes, rules, rules, cut, config.num_experts)

    def export(self, folder: str) -> Callable[[], None] | None:
        """Write an HF directory: configuration, weights in the run's dtype, tokenizer, settings of generation with its
        stops. Adapters are written in peft's format and in float32; transformers opens them with the settings of their
        base.

        All ranks call it to gather each tensor in the host memory of the first rank, which writes them later.
        """
        # Every rank takes part in gathering; only the first one writes.
        dtype = torch.float32 if self.model.lora is not None else self.dtype
        tensors = {name: tensor.to(dtype).contiguous() for name, tensor in self._wholes()}
        if self.ranks.rank:
            return None

        def write() -> None:
            tokenizer, config = self.tokenizer, self.model.config
            if isinstance(self.model, Scorer):
                tokenizer = tokenizer.for_scores()
                config = replace(config, pad_token_id=tokenizer.pad)
            if self.model.lora is None:
                save_model(self.model, tensors, folder, config)
            else:
                # An absolute path: a reader may run in another folder.
                base = str(read_adapters(self.context.model)[0].absolute()) if self.context.model else ""
                save_adapters(self.model.lora, tensors, base, folder)
            tokenizer.save(folder)

        return write

    def _wholes(self) -> Iterator[tuple[str, Tensor]]:
        """The whole tensors of an export, on the CPU of the first rank."""
        return self.workers.whole(self.shapes)


class Frozen(SequenceModel[Model]):
    """A model that never changes. It has no state besides the directory that it was read from."""

    def state(self) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
        return {}, {}

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Do nothing: nothing was saved."""

    def export(self, folder: str) -> Callable[[], None] | None:
        """Write nothing: it is a model that the run was given."""
        return None


def _freeze_base(model: Model) -> Model:
    """Require gradients only of the value's own weights."""
    own = model.own_parameters()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in own)
    return model


Kind = TypeVar("Kind")


def expect(kind: type[Kind], value: object, name: str) -> Kind:
    """A carried value, if it is of the class that this package's maker makes. Raises TypeError for any other."""
    if not isinstance(value, kind):
        raise TypeError(f"{name}: given a {type(value).__name__}, needed a {kind.__name__}")
    return value


def _workers(model: Model, ranks: Ranks, context: Context) -> "DataParallelThreads[Model] | Shards[Model]":
    if ranks.count == 1:
        return DataParallelThreads(model, context.threads if context.device == "cpu" else 1)
    from penstock.nodes.parallel.fsdp import Shards  # half a second of imports, only if needed

    return Shards(model, ranks, torch_dtype(context.dtype), context.zero)


# Prefix of the names of master weights in a state.
MASTER = "master"


class MasterWeights(SequenceModel[Model]):
    """A model with float32 masters. `version` counts the updates that changed them."""

    called: ClassVar[str] = "model"
    """Its name in error messages."""

    def __init__(self, master: Model, tokenizer: Tokenizer, context: Context) -> None:
        parted, dtype = Ranks.of(context).count > 1, torch_dtype(context.dtype)
        # With several ranks FSDP gathers a converted copy for each use; a single rank keeps one.
        copied = not parted and dtype != torch.float32
        masters = {name: nn.Parameter(p.detach(), p.requires_grad) for name, p in master.own_parameters().items()}
        # Conversion gives the model memory of its own, and does not change that of the masters.
        super().__init__(master.to(dtype) if copied else master, tokenizer, context)
        self.masters: Mapping[str, Tensor] = masters if copied else self.own_parts()
        self.version = 0

    def state(self) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
        tensors = {f"{MASTER}.{name}": p.detach() for name, p in self.masters.items()}
        about = self.about()
        return tensors, {"version": self.version, **({"about": about} if about else {})}

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Raises ModelError for the state of another model, or of adapters of another base."""
        where = f"state of the {self.called}"
        if (given := facts.get("about", {})) != (own := self.about()):
            raise ModelError(f"{where}: given {given or 'all weights'}, needed {own or 'all weights'}")
        needed = {f"{kind}.{name}": p for kind in self._kinds(facts) for name, p in self.masters.items()}
        # With a state of another mesh, tensors of other stages have no elements.
        check_names(needed, {name: t for name, t in tensors.items() if t.numel() or name in needed}, where)
        for name, parameter in needed.items():
            if parameter.numel() or tensors[name].numel():  # empty tensors may have any width
                check_shape(name, tensors[name].shape, parameter, where)
        for name, parameter in self.masters.items():
            with torch.no_grad():
                parameter.copy_(tensors[f"{MASTER}.{name}"].view(parameter.shape))
        self.copy_masters()
        self.version = facts["version"]

    def _wholes(self) -> Iterator[tuple[str, Tensor]]:
        # Adapters, which are small, are exported as float32 masters.
        if self.model.lora is None or self.ranks.count > 1:
            return super()._wholes()
        return ((name, master.detach().to("cpu", copy=True)) for name, master in self.masters.items())

    def offloadable(self) -> Mapping[str, Tensor]:
        """The masters, if the model computes with a copy."""
        if all(self.masters[name] is self.workers.parameters[name] for name in self.masters):
            return {}
        return {f"{MASTER}.{name}": parameter for name, parameter in self.masters.items()}

    def copy_masters(self) -> None:
        """Copy the masters to the weights that the model computes with."""
        self.workers.update(self.masters)

    def _kinds(self, facts: Mapping[str, Any]) -> tuple[str, ...]:
        """The prefixes of the tensors of each parameter in a state with these facts."""
        return (MASTER,)


# The optimizer's tensors, each as large as the weights.
MOMENTS = ("exp_avg", "exp_avg_sq")
# Bytes of moments on the host that are on the device at once; more only for a larger tensor.
BUCKET_BYTES = 256 << 20
# After this many updates in a row with a gradient of 0 the user is warned.
IDLE_UPDATES = 3

Figures = TypeVar("Figures")


def _moment_bytes(parameter: Tensor) -> int:
    return len(MOMENTS) * parameter.nbytes


class Learner(MasterWeights[Model]):
    """A model that learns by AdamW. `updates` is the length of the run, for schedules of the learning rate, which
    `lr_warmup` and `lr_decay` change; `context` has the run's settings, and keys random draws of updates.
    `optimizer_on_host`: moments are on the host, except for those that a step is working on. Raises ValueError if the
    host lacks the memory for the moments of its ranks."""

    def __init__(self, master: Model, tokenizer: Tokenizer, context: Context) -> None:
        super().__init__(_freeze_base(master), tokenizer, context)
        self.optimizer = AdamW(self.masters.values())
        self.updates, self.lr_warmup, self.lr_decay = context.updates, context.lr_warmup, context.lr_decay
        # If an update takes its batch in parts: the normaliser and the sums over tokens of each part so far.
        self.parts: list[tuple[float, dict[str, float]]] = []
        self._idle = True  # whether all gradients since the last version were 0
        self._idle_updates = 0
        self.optimizer_on_host = context.optimizer_state == "host"
        if self.optimizer_on_host:
            self._check_host()

    def backward(
        self, items: Sequence[Packed], loss: Callable[[Model, Packed], tuple[Tensor, Figures]], *, last: bool = True
    ) -> list[Figures]:
        """Add the gradient of each micro-batch's loss to the masters'. Return the second results of `loss`, in order.
        Workers keep the gradients until a call with `last`, which has the last micro-batches of a term.

        Workers call `loss` at the same time, each with a model of its own, so `loss` must not change anything.
        """
        try:
            found = self.workers.backward(loss, items, last=last)
        except BaseException:
            # The gradients of other micro-batches would be added to those of the next attempt.
            self._forget_gradients()
            raise
        if not last:
            return found
        for name, gradient in self.workers.collect().items():
            master = self.masters[name]
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        return found

    def step(
        self,
        items: Sequence[Packed],
        loss: Callable[[Model, Packed], tuple[Tensor, Figures]],
        options: UpdateOptions,
        *,
        lr: float | Schedule,
        normaliser: float,
    ) -> tuple[list[Figures], dict[str, float]]:
        """Make an update of one AdamW step. Return (second results of `loss` by micro-batch, the step's metrics)."""
        found, rate = self.backward(items, loss), self.rate(lr)
        return found, {"grad_norm": self.apply(options, lr=rate, normaliser=normaliser), "lr": rate}

    def rate(self, lr: float | Schedule) -> float:
        """The learning rate of the update under way. Raises ValueError for one that is negative or not finite."""
        lr = scheduled(lr, self.lr_warmup, self.lr_decay)
        rate = float(lr(self.version, self.updates)) if callable(lr) else lr
        if not 0 <= rate < math.inf:
            where = f"update {self.version} of {self.updates}"
            raise ValueError(f"{where}: given a learning rate of {rate}, needed a finite number of at least 0")
        return rate

    def apply(self, options: UpdateOptions, *, lr: float, normaliser: float, last: bool = True) -> float:
        """Make one AdamW step on the collected gradient divided by `normaliser`. Return its 2-norm before clipping.

        An update may take several steps; its `last` one makes the next version. Raises FloatingPointError before any
        weight changes if the norm is not finite.
        """
        gradients = {name: p.grad for name, p in self.masters.items() if p.grad is not None}
        norm = self.workers.norm(gradients) / normaliser
        # Checked before any weight changes: the last checkpoint and the weights in memory stay the same.
        if not math.isfinite(norm):
            where = self._not_finite(gradients)
            self._forget_gradients()
            given = f"{self.context.node}: update of version {self.version}: given a gradient of norm {norm}: {where}"
            raise FloatingPointError(f"{given}; needed finite numbers. The weights are as they were")
        self._idle &= norm == 0
        if last:
            self._idle_updates, self._idle = self._idle_updates + 1 if self._idle else 0, True
            if self._idle_updates == IDLE_UPDATES:
                given = f"{self.context.node}: given {IDLE_UPDATES} updates in a row with a gradient of 0"
                needed = "a loss that the weights change; that of groups whose rewards are all equal is none"
                warnings.warn(f"{given}, needed {needed}", NodeWarning, stacklevel=2)
        # One factor for clipping and for the division by the normaliser, which the losses left out.
        scale = min(1.0, options["clip_norm"] / (norm + 1e-6)) / normaliser
        self.workers.each(lambda gradient: gradient.mul_(scale), list(gradients.values()))
        self.optimizer.lr, self.optimizer.weight_decay = lr, options["weight_decay"]
        self.optimizer.betas = options["betas"][0], options["betas"][1]
        if self.optimizer_on_host:
            self._step_in_buckets()
        else:
            # One piece for each thread.
            count = self.workers.count if self.own_threads() else 1
            self.workers.each(self.optimizer.step, [self.optimizer.parameters[k::count] for k in range(count)])
        self.optimizer.zero_grad()
        self.copy_masters()
        # An update makes one new version, however many steps it takes.
        self.version += int(last)
        return norm

    def state(self) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
        tensors, facts = super().state()
        return {**tensors, **self._moments()}, {**facts, "steps": self._steps()}

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        super().restore(tensors, facts)
        # A state from before the first step has no moments.
        self.optimizer.state.clear()
        for name, parameter in self.masters.items() if facts["steps"] else ():
            moments = {
                moment: self._offloaded_copy(tensors[f"{moment}.{name}"].to(parameter.dtype)) for moment in MOMENTS
            }
            step = torch.tensor(float(facts["steps"]), device=parameter.device)
            self.optimizer.state[parameter] = {"step": step, **moments}

    def offloadable(self) -> Mapping[str, Tensor]:
        """The optimizer's moments too, which only its steps read, unless they are on the host anyway."""
        return {**super().offloadable(), **({} if self.optimizer_on_host else self._moments())}

    def _step_in_buckets(self) -> None:
        """Make a step whose moments are copied from the host and back, a bucket at a time. Each element is computed as
        in a single step."""
        waiting = [(master, master.grad) for master in self.masters.values() if master.grad is not None]
        self.optimizer.zero_grad()
        while waiting:
            bucket, nbytes = list[tuple[Tensor, Tensor]](), 0
            while waiting and (not bucket or nbytes + _moment_bytes(waiting[0][0]) <= BUCKET_BYTES):
                bucket.append(waiting.pop(0))
                nbytes += _moment_bytes(bucket[-1][0])
            homes = {}
            for master, gradient in bucket:
                state = self.optimizer.state[master]
                homes[master] = {moment: state[moment] for moment in MOMENTS if moment in state}
                on_device = {m: home.to(self.device, non_blocking=True, copy=True) for m, home in homes[master].items()}
                state |= on_device
                master.grad = gradient
            self.optimizer.step()
            for master, _ in bucket:
                master.grad, state = None, self.optimizer.state[master]
                for moment in MOMENTS:
                    home = homes[master].get(moment)
                    # The first step makes the moments.
                    state[moment] = (
                        self._offloaded_copy(state[moment]) if home is None else home.copy_(state[moment], True)
                    )
        if self.device.type == "cuda":
            # A checkpoint reads them on the host.
            torch.cuda.current_stream(self.device).synchronize()

    def _check_host(self) -> None:
        sizes = [p.nbytes for p in self.masters.values() if p.requires_grad for _ in MOMENTS]
        if self.device.type == "cuda":  # torch allocates pinned memory by powers of two
            sizes = [1 << (size - 1).bit_length() for size in sizes]
        ranks, gib = self.context.host_ranks, usable_memory_gib()
        if (taken := ranks * sum(sizes)) > gib * 2**30:
            given = f"a host with {gib:.1f} GiB to use and {ranks} ranks on it, whose AdamW moments lie there"
            needed = f"{taken / 2**30:.1f} GiB, or --optimizer-state device"
            raise ValueError(f"{self.context.node} [host-memory]: given {given}, needed {needed}")

    def _offloaded_copy(self, moment: Tensor) -> Tensor:
        """A copy of a moment where moments are between steps."""
        copy = moment.to("cpu" if self.optimizer_on_host else self.device, copy=True)
        return copy.pin_memory() if self.optimizer_on_host and self.device.type == "cuda" else copy

    def _moments(self) -> dict[str, Tensor]:
        """The moments by their names in a state; none before the first step."""
        return {
            f"{moment}.{name}": self.optimizer.state[parameter][moment]
            for name, parameter in self.masters.items()
            for moment in MOMENTS
            if parameter in self.optimizer.state
        }

    def _kinds(self, facts: Mapping[str, Any]) -> tuple[str, ...]:
        return (MASTER, *MOMENTS) if facts["steps"] else (MASTER,)

    def _not_finite(self, gradients: Mapping[str, Tensor]) -> str:
        """For a message, the gradients that are not finite: the first tensor in the model's order, and its ranks."""
        every = self.workers.not_finite(gradients)
        wrong = [name for name in self.shapes if any(name in counts for counts in every)]
        if not wrong:
            return "every element is finite, and the sum of their squares is not"
        first = wrong[0]
        held = [f"{counts[first]} on rank {rank}" for rank, counts in enumerate(every) if first in counts]
        count = ", ".join(held) if len(every) > 1 else str(every[0][first])
        more = f", and of {len(wrong) - 1} more of {len(self.shapes)} tensors" if len(wrong) > 1 else ""
        return f"elements of {first} that are NaN or infinite: {count}{more}"

    def _forget_gradients(self) -> None:
        self.parts = []
        self.workers.collect()
        self.optimizer.zero_grad()

    def _steps(self) -> int:
        """The optimizer's own count, which its bias correction needs."""
        return next((int(state["step"]) for state in self.optimizer.state.values()), 0)

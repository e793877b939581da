"""A model whose weights are sharded over ranks, and the work on micro-batches that the ranks share.

The same interface as `DataParallelThreads`, for ranks in place of threads: all ranks are given the same micro-batches,
each works on its share, and every rank gets all results. torch's own tools shard the weights: tensor parallelism by
DTensor, then FSDP2 (HSDP over an axis "dp"). Over "pp" each rank has some of the layers (`PipelineStage`), over "ep"
some of each layer's experts, to which tokens are sent (`TokenExchange`): experts are sharded over "fsdp", all other
weights over "fsdp" and "ep" together.

Invariant: the float32 shards are the master weights; for computation they are gathered layer by layer, in the run's
dtype.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from penstock.graph.protocols import (
    DATA,
    EXPERT,
    FSDP,
    STAGE,
    TENSOR,
    Axes,
    Rule,
    expert_of,
    num_ranks,
    place_of_expert,
    rule_of,
)
from penstock.nodes.learn.batching import Packed, token_counts
from penstock.nodes.learn.data_parallel_threads import count_not_finite
from penstock.nodes.model import CausalLM, Decoder
from penstock.nodes.model.decoder import Norm
from penstock.nodes.model.expert_parallel import TokenExchange
from penstock.nodes.model.lora import is_adapter
from penstock.nodes.model.mlp import Experts
from penstock.nodes.model.tensor_parallel import check_experts, check_tensor_parallel, stages_of, tensor_parallel
from penstock.nodes.model.vocab_parallel import VocabShard
from penstock.nodes.parallel.mesh import AXES, Ranks, assign, gather
from penstock.nodes.parallel.pipeline import PipelineStage

Model = TypeVar("Model", bound=Decoder)
Each = TypeVar("Each")
Result = TypeVar("Result")


class Shards(Generic[Model]):
    """Shards `model`, which every rank has whole, in place. It computes in `dtype`. An optimizer step is

        shards.backward(loss, items)         # once or several times, the last one with last=True
        gradients = shards.collect()         # this rank's parts, summed over ranks
        shards.update(masters)               # after the optimizer has changed them

    With `zero` 3, weights are gathered for each micro-batch and gradients reduced after each (ZeRO, Rajbhandari et al.,
    2020, arXiv 1910.02054, section 5). With 1, a step gathers weights once and reduces gradients after its last
    micro-batch: both are whole until then, and gradients are summed over micro-batches before they are summed over
    ranks. Replicas of the model ("dp") always add their gradients after the last micro-batch. The last micro-batch is
    that of the last call of `backward` before `collect`.

    `parameters` are this rank's parts as plain tensors, by name: changing them in place changes the model.
    """

    def __init__(self, model: Model, ranks: Ranks, dtype: torch.dtype, zero: int = 3) -> None:
        self.model, self.ranks, self.rules, self.zero = model, ranks, tensor_parallel(model.config), zero
        # Backward passes until gradients are reduced; at least 1 between two calls whose gradients are one sum.
        self._passes_to_come = 0
        # After such a call: repeats one of its micro-batches, which then does not count.
        self._again: Callable[[], object] | None = None
        self.count = ranks.shares
        self._wholes = {name: (p.shape, p.dtype) for name, p in model.named_parameters()}
        self._stage = PipelineStage(model, ranks, dtype) if ranks.size(STAGE) > 1 else None
        _cut(model, ranks, dtype, self.rules, zero)
        self._parts: dict[str, DTensor] = dict(model.named_parameters())  # type: ignore[arg-type]
        self.parameters: dict[str, Tensor] = {
            name: nn.Parameter(part.to_local().detach(), part.requires_grad) for name, part in self._parts.items()
        }

    def map(self, work: Callable[[Model, Packed], Result], items: Sequence[Packed]) -> list[Result]:
        """`work(model, item)` of each item, in order, without a gradient."""
        with torch.no_grad():
            return self._share(lambda item, counts: work(self.model, item), items)

    def backward(
        self, loss: Callable[[Model, Packed], tuple[Tensor, Result]], items: Sequence[Packed], *, last: bool = True
    ) -> list[Result]:
        """Add up the gradients of the items' losses. Returns the second output of `loss` for each item, in order. A
        reduction after the last micro-batch waits for a call with `last`."""

        def work(item: Packed, counts: bool) -> Result:
            total, found = loss(self.model, item)
            self._before_backward()
            # Also for an item that does not count: all ranks take part in summing gradients.
            (total if counts else total * 0).backward()  # type: ignore[no-untyped-call]
            return found

        if items and not last:
            sizes = token_counts(items)
            smallest = sizes.index(min(sizes))
            self._again = lambda: self._share(lambda item, _: work(item, False), [items[smallest]])
        elif not items and last and self._again is not None:
            # The gradients of earlier calls have not been reduced yet.
            self._again()
        return self._share(work, items, last=last)

    def each(self, work: Callable[[Each], Result], items: Sequence[Each]) -> list[Result]:
        """`work(item)` of each item, in order, on this rank."""
        return [work(item) for item in items]

    def collect(self) -> dict[str, Tensor]:
        """This rank's parts of the gradients since the last call, summed over all ranks, float32, by name."""
        total = {}
        for name, part in self._parts.items():
            if isinstance(part.grad, DTensor):
                total[name] = part.grad.to_local().float()
            part.grad = None
        self._again = None
        if self._passes_to_come:  # a step has failed
            self._drop_unreduced()
        return total

    def update(self, masters: Mapping[str, Tensor]) -> None:
        """Free the gathered copies of `masters`, which are the parameters, and have changed."""
        for module in self._wrapped():
            module.reshard()

    def norm(self, parts: Mapping[str, Tensor]) -> float:
        """The 2-norm of all tensors together; `parts` are this rank's parts of them, sharded as the weights are. If a
        part on one rank is NaN or infinite, so is the norm on all ranks."""
        # Each part counts once: on the first of the ranks that have it.
        copy, whole = self.ranks.place(DATA), self.ranks.place(TENSOR) == 0
        own, again = list[Tensor](), list[Tensor]()
        for name, part in parts.items():
            (own if copy == 0 and (whole or rule_of(name, self.rules)) else again).append(part)
        square = float(torch.nn.utils.get_total_norm(own)) ** 2
        # Ranks with the same part should have the same bits. If one has not, all ranks must stop together.
        if not torch.nn.utils.get_total_norm(again).isfinite():
            square = math.nan
        total = torch.tensor(square, dtype=torch.float64, device=self.model.device)
        dist.all_reduce(total)
        return float(total.sqrt())

    def not_finite(self, parts: Mapping[str, Tensor]) -> list[dict[str, int]]:
        """The number of elements of each tensor that are not finite, by rank; tensors without any are left out."""
        own = {name: torch.tensor(count) for name, count in count_not_finite(parts).items()}
        every = [found for (found,) in gather([own or None], self.model.device)]
        return [{name: int(count) for name, count in (found or {}).items()} for found in every]

    def whole(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Whole copies of these tensors on the CPU. All ranks call it; only the first rank gets their elements."""
        count = self.ranks.size(STAGE)
        held = stages_of(self.model.config, self._wholes, count) if count > 1 else {}
        for name in names:
            shape, dtype = self._wholes[name]
            expert, experts, over = expert_of(name), self.model.config.num_experts, self.ranks.size(EXPERT)
            place = None if expert is None or over == 1 else place_of_expert(expert, experts, over)
            # The first rank that has parts of it.
            owner = next(
                rank
                for rank in range(self.ranks.count)
                if self.ranks.place(STAGE, rank) in held.get(name, (0,))
                and place in (None, self.ranks.place(EXPERT, rank))
            )
            tensor = torch.empty(0, dtype=dtype)
            if name in self._parts:
                tensor = _gathered(self._parts[name])
                if self.ranks.rank == owner != 0:
                    dist.send(tensor, 0)
            elif self.ranks.rank == 0:
                tensor = torch.empty(shape, dtype=dtype, device=self.model.device)
                dist.recv(tensor, owner)
            # Always a copy: a tensor that only this rank has would be its own weight, which the next update changes.
            yield name, tensor.to("cpu", copy=True) if self.ranks.rank == 0 else tensor.new_empty(0)

    def _before_backward(self) -> None:
        """Tell FSDP what to do after the backward pass that begins: the last one reduces what earlier ones have not."""
        self._passes_to_come -= 1
        last = self._passes_to_come == 0
        root: FSDPModule = self.model  # type: ignore[assignment]
        if self.zero == 1:
            root.set_requires_gradient_sync(last)
            root.set_reshard_after_backward(last)
        elif self.ranks.size(DATA) > 1:
            root.set_requires_all_reduce(last)

    def _drop_unreduced(self) -> None:
        """Drop the gradients that FSDP has added up and not reduced."""
        self._passes_to_come = 0
        for module in self._wrapped():
            for group in _groups(module):
                group._partial_reduce_output = None
                for each in group.fsdp_params:
                    each.unsharded_accumulated_grad = None
                    if hasattr(each, "_unsharded_param"):
                        each._unsharded_param.grad = None

    def _wrapped(self) -> list[FSDPModule]:
        return [module for module in self.model.modules() if isinstance(module, FSDPModule)]

    def _share(
        self, work: Callable[[Packed, bool], Result], items: Sequence[Packed], *, last: bool = True
    ) -> list[Result]:
        """Results of all items, in order, on every rank."""
        if not items:
            return []
        # All ranks gather weights together: a rank with fewer items than others repeats the smallest item, which does
        # not count.
        costs = token_counts(items)
        shares = assign(costs, self.count)
        own, rounds = shares[self.ranks.share()], max(map(len, shares))
        smallest = costs.index(min(costs))
        todo = [(items[index], True) for index in own] + [(items[smallest], False) for _ in range(rounds - len(own))]
        if torch.is_grad_enabled():
            self._passes_to_come = len(todo) + (not last)
        try:
            found = (
                self._stage.run(work, todo, self._before_backward) if self._stage else [work(*each) for each in todo]
            )
        finally:
            self.update(self.parameters)
        every = gather(found, self.model.device)
        results: dict[int, Result] = {}
        for share, rank in zip(shares, self.ranks.reporting_ranks(), strict=True):
            results |= zip(share, every[rank][: len(share)], strict=True)
        return [results[index] for index in range(len(items))]


def _cut(model: Decoder, ranks: Ranks, dtype: torch.dtype, rules: Mapping[str, Rule], zero: int) -> None:
    """Shard a model: distribute experts, then tensor parallelism within each layer, then FSDP2. FSDP2's units are each
    layer's experts if they are distributed, each layer, the embedding, the head, and the rest. Then load each rank's
    parts.

    Raises ValueError for a group of another size, ModelError if "tp" does not divide the heads or "ep" the experts.
    """
    if dist.get_world_size() != ranks.count:
        raise ValueError(f"given a mesh of {ranks.count} ranks in a group of {dist.get_world_size()}, needed as many")
    check_tensor_parallel(model.config, ranks.size(TENSOR), shared_heads=False)
    check_experts(model.config, ranks.size(EXPERT))
    mesh, layers = _device_mesh(ranks.mesh, model.device.type), list(model.model.layers.children())
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    source, buffers = _unread(model), dict(model.named_buffers())
    # A mesh of its own: experts are not sharded over the axis that distributes them.
    of_experts, dealt = mesh, list[nn.Module]()
    if ranks.size(EXPERT) > 1:
        of_experts = _device_mesh(ranks.mesh, model.device.type, with_experts=True)
        model.distribute_experts(TokenExchange(of_experts.get_group(EXPERT)))
        dealt = [module.experts for module in model.modules() if isinstance(module, Experts)]
    if ranks.size(TENSOR) > 1:
        for layer in layers:
            plan = _tensor_plan(layer, rules, of_experts[TENSOR])
            parallelize_module(layer, mesh[TENSOR], plan, src_data_rank=None)
        _cut_words(model, mesh[TENSOR], rules)
    embedding, head = model.model.embed_tokens, getattr(model, "lm_head", None)
    # A tied embedding is needed until the backward pass has begun.
    tied = isinstance(model, CausalLM) and model.config.tie_word_embeddings
    ends = [end for end in (embedding, head) if end is not None and any(True for _ in end.parameters())]
    for each in (*dealt, *layers, *ends, model):
        # The backward pass begins with the head and the other weights outside of layers: keep them gathered.
        keeps = each in (head, model) or (tied and each is embedding) or zero == 1
        own = of_experts if each in dealt else mesh
        outer = own[DATA, FSDP] if ranks.size(DATA) > 1 else own[FSDP]
        module = fully_shard(each, mesh=outer, mp_policy=precision, reshard_after_forward=not keeps)
        # Losses are already weighted: gradients are summed over ranks, not averaged. gloo has no other reduction.
        if outer.size() > 1:  # else torch would divide by 1
            module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        # The gradient of a look-up needs no weights.
        module.set_unshard_in_backward(tied or each is not embedding)
    # So far the parameters have only shapes: a rank allocates and reads only its own parts.
    device = model.device
    model.to_empty(device=device)
    for name, buffer in buffers.items():
        setattr(model, name, buffer.to(dtype))
    for name, part in model.named_parameters():
        assert isinstance(part, DTensor)
        shape, first = compute_local_shape_and_global_offset(part.shape, part.device_mesh, part.placements)
        if all(shape):
            region = tuple(slice(start, start + length) for start, length in zip(first, shape, strict=True))
            part.to_local().detach().copy_(source(name, region))


def _unread(model: Decoder) -> Callable[[str, tuple[slice, ...]], Tensor]:
    """Reduce a model's weights to their shapes. Returns a function that reads a region of a weight."""
    if model.source is not None:
        return model.source
    wholes = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in list(model.named_parameters()):
        place, _, last = name.rpartition(".")
        setattr(model.get_submodule(place), last, nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad))
    return lambda name, region: wholes[name][region]


def _cut_words(model: Decoder, mesh: DeviceMesh, rules: Mapping[str, Rule]) -> None:
    """Shard the embedding and the head that this rank has over the vocabulary; `VocabShard` sums over the ranks."""
    model.shard_vocab(VocabShard(model.config.vocab_size, mesh.size(), mesh.get_local_rank(), mesh.get_group()))
    for name, parameter in list(model.named_parameters()):
        if rule_of(name, rules) is not None and not isinstance(parameter, DTensor):
            place, _, last = name.rpartition(".")
            rows = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            setattr(model.get_submodule(place), last, nn.Parameter(rows, parameter.requires_grad))


def _groups(module: FSDPModule) -> Sequence[Any]:
    """torch's own records of the parameters that a module gathers and reduces together."""
    state: Any = module._get_fsdp_state()
    found = getattr(state, "_fsdp_param_groups", None)  # several from torch 2.12 on
    return found if found is not None else [group for group in (state._fsdp_param_group,) if group is not None]


def _gathered(part: DTensor) -> Tensor:
    """A tensor gathered from its parts."""
    # Over "tp" last, since it was sharded over "tp" first.
    axes = zip(part.device_mesh.mesh_dim_names or (), part.placements, strict=True)
    placements = [placement if axis == TENSOR else Replicate() for axis, placement in axes]
    cut: Any = part.detach()
    whole: Tensor = cut.redistribute(placements=placements).full_tensor()
    return whole.contiguous()


def _tensor_plan(layer: nn.Module, rules: Mapping[str, Rule], of_experts: DeviceMesh) -> dict[str, ParallelStyle]:
    """How each linear map of a layer is sharded, those of experts over `of_experts`. Inputs of attention and MLP are
    prepared once for all of their maps."""
    plan: dict[str, ParallelStyle] = {
        "self_attn": PrepareModuleInput(
            input_layouts=(Replicate(), None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "mlp": PrepareModuleInput(input_layouts=(Replicate(), None), desired_input_layouts=(Replicate(), None)),
    }
    for name, module in layer.named_modules():
        if isinstance(module, Experts):
            plan[name] = _OfExperts(rules, of_experts)
        elif isinstance(module, nn.Linear) and not (name.startswith("mlp.") and isinstance(plan["mlp"], _OfExperts)):
            if is_adapter(f"{name}.weight"):
                continue  # sharded with the map that it belongs to
            rule = rule_of(f"{name}.weight", rules)
            assert rule is not None
            plan[name] = _Columns() if rule[0] == 0 else _Rows()
        elif name.startswith("self_attn.") and isinstance(module, Norm):
            plan[name] = _OfHeads()
    return plan


class _OfHeads(ParallelStyle):
    """A norm that each rank has whole and applies to its own heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Norm)
        module.sharers = device_mesh.get_group()
        return module


class _OfExperts(ParallelStyle):
    """Each rank has a part of every expert's inner width; outputs are summed once, and so are gradients."""

    def __init__(self, rules: Mapping[str, Rule], mesh: DeviceMesh) -> None:
        super().__init__()
        self.rules, self.mesh = rules, mesh

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Experts)
        module.sharers = device_mesh.get_group()
        for name, each in module.experts.named_modules():
            if isinstance(each, nn.Linear):
                rule = rule_of(f"{name}.weight", self.rules)
                assert rule is not None
                _distribute(each, self.mesh, rule[0])
        return module


class _Columns(ColwiseParallel):
    """Shards a linear map by its outputs. Of an adapter, B is sharded like the weight, and A is whole."""

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        if name != "lora_A":
            _distribute(module, device_mesh, 0)


class _Rows(RowwiseParallel):
    """Shards a linear map by its inputs. Of an adapter, A is sharded like the weight, and B is whole."""

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        if name != "lora_B":
            _distribute(module, device_mesh, 1)


def _distribute(module: nn.Module, mesh: DeviceMesh, dim: int) -> None:
    """Shard a linear map's weight and bias. torch replicates what is not sharded."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        part = distribute_tensor(parameter.detach(), mesh, [Shard(dim)], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(part, parameter.requires_grad))


@lru_cache
def _device_mesh(axes: Axes, device: str, *, with_experts: bool = False) -> DeviceMesh:
    """A mesh of all axes of a model, outermost first, for any order of `axes`; one for all models of this process. Its
    axis "fsdp" includes that of "ep", unless `with_experts`."""
    names, sizes = [name for name, _ in axes], dict(axes)
    ranks = torch.arange(num_ranks(axes)).view([size for _, size in axes])
    ranks = ranks.permute([names.index(name) for name in AXES if name in names])
    if not with_experts:
        sizes[FSDP] = sizes.get(FSDP, 1) * sizes.pop(EXPERT, 1)
    own = tuple(name for name in AXES if name != EXPERT or with_experts)
    # In the order of their numbers, also if "ep" is outside of "fsdp": torch sorts the ranks of a group.
    ranks = ranks.reshape([sizes.get(name, 1) for name in own]).sort(own.index(FSDP)).values
    mesh = DeviceMesh(device, ranks, mesh_dim_names=own)
    # Its groups get the timeout of the default group: torch would give them half an hour.
    timeout = c10d._get_default_group()._get_backend(torch.device(device)).options._timeout
    for group in mesh.get_all_groups():
        c10d._set_pg_timeout(timeout, group)
    return mesh

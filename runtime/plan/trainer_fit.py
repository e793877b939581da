"""What a run leaves to its trainer's memory: whether layers are recomputed, the tokens of a micro-batch, the logits
that are kept at once, and where AdamW's moments lie. Pure but for the sizes of the model, which are read.

`fit` takes the fastest step under the cost model (`train_cost`) of those that fit beside what else lies on the GPU.
`fitted` asks it for a run, of every pool that learns on a GPU of a known kind. Models beside the policy count as if
they had its shape.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from penstock.graph.types import MAX_PROMPT
from penstock.runtime.cluster.capabilities import OptimizerState, Recompute
from penstock.runtime.cluster.cluster import Cluster, ClusterError
from penstock.runtime.cluster.gpus import Gpu
from penstock.runtime.cluster.placement import Replica, decodes
from penstock.runtime.control.run_config import RunConfig, RunOptions
from penstock.runtime.plan.candidates import DEDICATED, SHARED, micro_tokens
from penstock.runtime.plan.decode_cost import Generator, generator_memory
from penstock.runtime.plan.infeasible import HOST_MEMORY, NO_FIT
from penstock.runtime.plan.model_shape import Parallel, ShapeError, read_shape
from penstock.runtime.plan.roles import Models, is_copy, is_model, with_adapters
from penstock.runtime.plan.train_cost import (
    Memory,
    Trainer,
    beside_memory,
    host_moments,
    logit_elements,
    trainer_memory,
)

# Of a model whose gradients a run computes: more tokens than these make a step no faster.
MOST_TOKENS = 16384
# The share of the backward pass's repetition that each choice of a run is.
SHARES: dict[Recompute, float] = {"none": 0.0, "layer": 1.0}
# Micro-batches of most tokens in the step whose seconds decide.
ROUNDS = 4


@dataclass(frozen=True)
class Place:
    """A trainer's rank: the layout, bytes that its GPU has for it, copies that follow the policy, and the host of each
    rank."""

    trainer: Trainer
    room: float
    copies: int = 0
    colocated: Models = Models(0)  # noqa: RUF009 - frozen
    hosts: Sequence[str] = ()

    def memory(self, trainer: Trainer) -> Memory:
        own = trainer_memory(trainer, self.copies)
        return own + beside_memory(trainer, self.colocated) if self.colocated.count else own


def fit(
    places: Sequence[Place], longest: int, recompute: Sequence[float] = (0.0, 1.0), most: int = MOST_TOKENS
) -> Trainer | None:
    """The first trainer with the share of recomputation and the tokens of a micro-batch that make the fastest step of
    those that fit all places; None if none does. No micro-batch is shorter than the `longest` sequence."""
    best, seconds = None, inf
    for tokens in micro_tokens(longest, most):
        for again in recompute:
            every = [replace(each.trainer, micro_tokens=tokens, recompute=again) for each in places]
            if any(p.memory(trainer).bytes > p.room for p, trainer in zip(places, every, strict=True)):
                continue
            taken = every[0].update(np.full(every[0].mesh.data * max(1, ROUNDS * most // longest), longest)).seconds
            if taken < seconds:
                best, seconds = every[0], taken
    return best


def fitted(config: RunConfig, cluster: Cluster) -> RunOptions:
    """The options of a run with `auto` and 0 decided, as far as the kinds of its GPUs are known; else a layer keeps
    what it computes, moments are on the device, and 0 is left to the nodes. Moments go to the host where nothing else
    fits.

    Raises ClusterError for a model that does not fit, unless recomputation and micro-batch are both given, and for
    moments that are more than the memory of their host, where the cluster says it.
    """
    options = config.flags
    kept = replace(options, recompute="none") if options.recompute == "auto" else options
    kept = replace(kept, optimizer_state="device") if options.optimizer_state == "auto" else kept
    given_both = options.recompute != "auto" and options.micro_tokens > 0
    places = list(_places(config, cluster)) if options.device != "cpu" and options.model else []
    if not places:
        return kept
    shares = tuple(SHARES.values()) if options.recompute == "auto" else (SHARES[options.recompute],)
    longest = int(dict(config.graph.options).get("max_prompt") or MAX_PROMPT) + options.max_tokens
    given = options.micro_tokens
    states = {"auto": (False, True), "device": (False,), "host": (True,)}[options.optimizer_state]
    for on_host in states:
        tried = [replace(each, trainer=replace(each.trainer, host_state=on_host)) for each in places]
        found = fit(tried, max(given, longest), shares, given or MOST_TOKENS)
        if found is not None:
            _require_host_memory(tried, cluster)
            break
    else:
        if given_both:
            return kept
        least = replace(tried[0].trainer, micro_tokens=max(given, longest), recompute=shares[-1])
        raise ClusterError(_refusal(tried[0], least))
    chosen = next(name for name, share in SHARES.items() if share == found.recompute)
    elements = options.logit_elements or logit_elements(found.gpu)
    where: OptimizerState = "host" if found.host_state else "device"
    tokens = given or found.micro_tokens
    return replace(options, recompute=chosen, micro_tokens=tokens, logit_elements=elements, optimizer_state=where)


def _require_host_memory(places: Sequence[Place], cluster: Cluster) -> None:
    """Raises ClusterError for a host whose memory is less than the moments on it."""
    taken = Counter[str]()
    for place in places:
        own, critic = host_moments(place.trainer), host_moments(place.trainer.all_learning())
        for host in place.hosts:
            taken[host] += round(own + critic * place.colocated.critics)
    for host, needed in taken.items():
        memory = (cluster.memory_gib(cluster.host(host)) or inf) * 2**30
        if needed > memory:
            given = f"given {memory / 1e9:.1f} GB of memory of host {host}, needed {needed / 1e9:.1f} GB"
            raise ClusterError(
                f"AdamW's moments on the host do not fit [{HOST_MEMORY}]: {given}: more hosts have less each"
            )


def _refusal(place: Place, least: Trainer) -> str:
    memory, shape = place.memory(least), least.shape
    given = f"{place.room / 1e9:.1f} GB for a rank of {least.mesh}"
    change = ""
    if not least.host_state and place.memory(replace(least, host_state=True)).bytes <= place.room:
        change = "It would fit with --optimizer-state host. "
    for fsdp in () if change else (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
        wider = replace(least, mesh=replace(least.mesh, fsdp=least.mesh.fsdp * fsdp), zero3=True)
        if place.memory(wider).bytes <= place.room:
            change = f"It would fit with {wider.mesh}. "
            break
    more = "--recompute and --micro-tokens, both given, are tried in any case"
    return f"{shape.name} does not fit [{NO_FIT}]: given {given}, needed {memory}. {change}{more}"


def _places(config: RunConfig, cluster: Cluster) -> Iterator[Place]:
    """Of each pool that learns on GPUs whose kind is said."""
    try:
        shape = read_shape(config.flags.model)
    except ShapeError:
        return  # the run says itself what it lacks
    graph, flags = config.graph, config.flags
    models = {argument.name for argument in graph.carried if is_model(graph, argument)}
    copies = {argument.name for argument in graph.carried if is_copy(argument)}
    learning = {name for name in models - copies if graph.producer(name)}
    for pool in config.plan.pools:
        held, (replica, *_) = models.intersection(pool.holds), pool.replicas
        if not held & learning or (gpu := _gpu(replica, cluster)) is None:
            continue
        # A critic beside a policy learns all of its weights (`beside_memory`).
        policies = [with_adapters(shape, graph, name, flags.lora, flags.lora_targets) for name in held & learning]
        own_shape = next((each for each in policies if each.lora is not None), replace(shape, lora=None))
        trainer = Trainer(
            own_shape, gpu, _parallel(replica), "fp32" if config.flags.dtype == "float32" else "bf16",
            zero3=len(replica.ranks) > 1, logit_elements=config.flags.logit_elements,
        )  # fmt: skip
        colocated = Models(len(held - learning - copies), len(held & learning) - 1)
        where = (replica.ranks[0].host, replica.ranks[0].device)
        others = [each for each in config.plan.pools if each is not pool and where in each.places]
        room = gpu.memory_bytes
        for other in others:
            mesh, own = _parallel(other.replicas[0]), models.intersection(other.holds)
            if any(node.name in other.holds and decodes(graph, node) for node in graph.nodes):
                turns = config.offload != "off"
                generator = Generator(shape, gpu, mesh, 0 if turns else config.flags.slots)
                context = dict(graph.options).get("max_prompt") or MAX_PROMPT
                memory = generator_memory(generator, context + config.flags.max_tokens, SHARED if turns else DEDICATED)
                room -= memory.used
            elif own:
                aside = replace(trainer, mesh=mesh)
                parts = beside_memory(aside, Models(len(own - learning), len(own & learning))).parts
                room -= sum(parts.values())
        yield Place(trainer, room, len(held & copies), colocated, [rank.host for rank in replica.ranks])


def _gpu(replica: Replica, cluster: Cluster) -> Gpu | None:
    """The kind of a replica's first GPU, if it is said."""
    rank = replica.ranks[0]
    if rank.device == "cpu":
        return None
    try:
        return cluster.gpu_of(cluster.host(rank.host))
    except ClusterError:
        return None


def _parallel(replica: Replica) -> Parallel:
    return Parallel.of(replica.mesh)

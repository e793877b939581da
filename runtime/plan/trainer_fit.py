"""Choose the options of a run that depend on the trainer's memory: recomputation, the tokens of a micro-batch, the
logits that are kept at once, and the place of AdamW's moments. Pure except for reading the model's sizes.

`fit` takes the fastest step under the cost model (`train_cost`) that fits beside everything else on the GPU. `fitted`
applies it to the pools of a run that learn on GPUs of known kinds. `require_hosts` checks the memory of hosts whose
ranks have no GPU. Models beside the policy count as if they had its shape.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import cast

import numpy as np

from penstock.graph.machine import usable_memory_gib
from penstock.runtime.cluster.capabilities import OptimizerState, Recompute
from penstock.runtime.cluster.cluster import Cluster, ClusterError
from penstock.runtime.cluster.gpus import BYTES, Gpu, Precision, gpu_like
from penstock.runtime.cluster.placement import Pool, Rank, Replica, decodes
from penstock.runtime.control.run_config import RunConfig, RunOptions
from penstock.runtime.plan.candidates import micro_tokens
from penstock.runtime.plan.decode_cost import VERSIONS, Generator, generator_memory
from penstock.runtime.plan.infeasible import HOST_MEMORY, NO_FIT
from penstock.runtime.plan.model_shape import Parallel, Shape, ShapeError, read_shape
from penstock.runtime.plan.roles import Models, is_copy, is_model, with_adapters
from penstock.runtime.plan.train_cost import (
    Memory,
    Trainer,
    beside_memory,
    host_moments,
    logit_elements,
    trainer_memory,
)

# The most tokens of a micro-batch: more make a step no faster.
MOST_TOKENS = 16384
# The parts of a rank's memory that a CPU uses only during a step, or not at all.
PASSING = ("activations", "logits", "unsharded blocks", "moments in a step", "reserved")
# The share of the forward pass that the backward pass repeats, for each choice of a run.
SHARES: dict[Recompute, float] = {"none": 0.0, "layer": 1.0}
# Candidates are compared by the seconds of a step with about this many micro-batches of `MOST_TOKENS`.
ROUNDS = 4


@dataclass(frozen=True)
class TrainerRank:
    """A trainer's rank: the layout, the bytes of its GPU that it may use, how many copies follow the policy, the bytes
    of a weight in its snapshots, the models on the same GPU, and the host of each rank."""

    trainer: Trainer
    room: float
    copies: int = 0
    snapshots: float = 0.0
    colocated: Models = Models(0)  # noqa: RUF009 - frozen
    hosts: Sequence[str] = ()

    def memory(self, trainer: Trainer) -> Memory:
        own = trainer_memory(trainer, self.copies, self.snapshots)
        return own + beside_memory(trainer, self.colocated) if self.colocated.count else own


def fit(
    places: Sequence[TrainerRank], longest: int, recompute: Sequence[float] = (0.0, 1.0), most: int = MOST_TOKENS
) -> Trainer | None:
    """The first place's trainer, with the share of recomputation and the micro-batch of the fastest step that fits all
    places; None if none does. No micro-batch is shorter than the `longest` sequence."""
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
    """The options of a run with `auto` and 0 replaced by fitted values, if the kinds of its GPUs are known. If not,
    layers are not recomputed, moments are on the device, and 0 is left to the nodes. Moments go to the host only if
    nothing else fits.

    Raises ClusterError for a model that does not fit, unless recomputation and micro-batch are both given, and for
    moments that exceed the memory of their host, if the cluster says it.
    """
    options = config.flags
    kept = replace(options, recompute="none") if options.recompute == "auto" else options
    kept = replace(kept, optimizer_state="device") if options.optimizer_state == "auto" else kept
    given_both = options.recompute != "auto" and options.micro_tokens > 0
    if options.device == "cpu" or not options.model:
        return kept
    try:
        run = _Run.of(config)
    except ShapeError:
        return kept  # the run reports this itself
    places = list(_places(run, cluster))
    if not places:
        return kept
    shares = tuple(SHARES.values()) if options.recompute == "auto" else (SHARES[options.recompute],)
    longest, given = run.longest, options.micro_tokens
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


def require_hosts(config: RunConfig, cluster: Cluster) -> None:
    """Raises ClusterError for a host whose memory is too small for its ranks without a GPU: weights, the cache of all
    slots, gradients and moments. Memory that is used only during a step is not counted. Not checked: a host that does
    not say its memory and is not this machine, and a model that the run makes itself."""
    if not config.flags.model:
        return
    try:
        run = _Run.of(config)
    except ShapeError:
        return  # the run reports this itself
    for host in cluster.hosts:
        gib = cluster.memory_gib(host) or (usable_memory_gib() if host.agent == "local" else None)
        if gib is None:
            continue
        device, kept = gpu_like("", gib), Counter[str]()  # a stand-in: only its memory is used
        for pool in config.plan.pools:
            ranks = [r for replica in pool.replicas for r in replica.ranks if (r.host, r.device) == (host.name, "cpu")]
            place = run.place(pool, device)
            memory = place.memory(place.trainer) if place else run.aside(pool, device)
            kept.update({name: size * len(ranks) for name, size in memory.parts.items() if name not in PASSING})
        needed = Memory(kept)
        if needed.bytes > device.memory_bytes:
            given, slots = f"{device.memory_bytes / 1e9:.1f} GB on host {host.name}", config.flags.slots
            cache = f"The cache is that of {slots} slots with {run.longest} positions each"
            raise ClusterError(
                f"{run.shape.name} does not fit [{NO_FIT}]: given {given}, needed {needed}, beside what a step takes. "
                f"{cache}: fewer --slots or --max-tokens take less, and so do --dtype bfloat16 and --lora"
            )


def _require_host_memory(places: Sequence[TrainerRank], cluster: Cluster) -> None:
    """Raises ClusterError for a host whose memory is smaller than the moments on it."""
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


def _refusal(place: TrainerRank, least: Trainer) -> str:
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


@dataclass(frozen=True)
class _Run:
    """The models in the pools of a run. `names` are their carried values, of which some are `learning` and some are
    `copies` that follow a policy. `shape` is the shape of the model that the run is given."""

    config: RunConfig
    shape: Shape
    names: frozenset[str]
    learning: frozenset[str]
    copies: frozenset[str]

    @staticmethod
    def of(config: RunConfig) -> "_Run":
        """Raises ShapeError for a model whose shape cannot be read."""
        graph = config.graph
        names = frozenset(argument.name for argument in graph.carried if is_model(graph, argument))
        copies = frozenset(argument.name for argument in graph.carried if is_copy(argument))
        learning = frozenset(name for name in names - copies if graph.producer(name))
        return _Run(config, read_shape(config.flags.model), names, learning, copies)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, which are the positions of each slot: no more than the model's context."""
        longest = self.config.flags.max_prompt + self.config.flags.max_tokens
        return min(longest, self.shape.context or longest)

    def place(self, pool: Pool, gpu: Gpu) -> TrainerRank | None:
        """A rank of a pool, with all of its GPU; None if the pool does not learn."""
        held = self.names.intersection(pool.holds)
        if not held & self.learning:
            return None
        colocated = Models(len(held - self.learning - self.copies), len(held & self.learning) - 1)
        hosts = [rank.host for rank in pool.replicas[0].ranks]
        channels = [each for each in self.config.channels().values() if each.carried in held]
        sent = self.config.kept_versions * sum(BYTES[each.precision or self._wire] for each in channels)
        return TrainerRank(self._trainer(pool, gpu), gpu.memory_bytes, len(held & self.copies), sent, colocated, hosts)

    def aside(self, pool: Pool, gpu: Gpu) -> Memory:
        """The memory that a rank of `pool` takes beside a trainer: a generator's, or that of other models."""
        graph, flags, held = self.config.graph, self.config.flags, self.names.intersection(pool.holds)
        if any(node.name in pool.holds and decodes(graph, node) for node in graph.nodes):
            turns, replica = self.config.offload != "off", pool.replicas[0]
            narrow = next((cast(Precision, node.precision) for node in graph.nodes if node.precision), None)
            # A CPU has a second copy, in the order in which its products read it: `pack` in nodes/model/kernels.py.
            copies = VERSIONS + (replica.ranks[0].device == "cpu" and not narrow and not flags.invariant)
            generator = Generator(
                self._policy(self.learning), gpu, _parallel(replica), 0 if turns else flags.slots,
                narrow or self._precision, cache=self._precision,
            )  # fmt: skip
            return generator_memory(generator, self.longest, copies)
        models = Models(len(held - self.learning), len(held & self.learning))
        return beside_memory(self._trainer(pool, gpu), models) if held else Memory({})

    @property
    def _wire(self) -> Precision:
        wire: dict[str, Precision] = {"bfloat16": "bf16", "int8": "int8", "fp8": "fp8", "fp8_block": "fp8"}
        return wire.get(self.config.flags.wire, self._precision)

    @property
    def _precision(self) -> Precision:
        return "fp32" if self.config.flags.dtype == "float32" else "bf16"

    def _trainer(self, pool: Pool, gpu: Gpu) -> Trainer:
        replica, policy = pool.replicas[0], self._policy(self.learning.intersection(pool.holds))
        return Trainer(
            policy, gpu, _parallel(replica), self._precision, zero3=len(replica.ranks) > 1,
            logit_elements=self.config.flags.logit_elements,
        )  # fmt: skip

    def _policy(self, learning: Iterable[str]) -> Shape:
        """The shape of the policy among values that learn."""
        graph, flags = self.config.graph, self.config.flags
        # A critic has no adapters: it learns all of its weights (`beside_memory`).
        every = [with_adapters(self.shape, graph, name, flags.lora, flags.lora_targets) for name in learning]
        return next((each for each in every if each.lora is not None), replace(self.shape, lora=None))


def _places(run: _Run, cluster: Cluster) -> Iterator[TrainerRank]:
    """A rank of each pool that learns on GPUs of a known kind."""
    pools = run.config.plan.pools
    for pool in pools:
        rank = pool.replicas[0].ranks[0]
        gpu = _gpu(rank, cluster)
        place = run.place(pool, gpu) if gpu is not None else None
        if gpu is not None and place is not None:
            others = (each for each in pools if each is not pool and (rank.host, rank.device) in each.places)
            yield replace(place, room=place.room - sum(run.aside(other, gpu).used for other in others))


def _gpu(rank: Rank, cluster: Cluster) -> Gpu | None:
    """The kind of a rank's GPU, if it is known."""
    if rank.device == "cpu":
        return None
    try:
        return cluster.gpu_of(cluster.host(rank.host))
    except ClusterError:
        return None


def _parallel(replica: Replica) -> Parallel:
    return Parallel.of(replica.mesh)

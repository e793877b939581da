"""The roles of a graph's pools, as far as the planner can cost them. Pure.

One pool updates the policy, one decodes with its broadcast weights. Other pools may hold models beside the policy, on
the trainer's GPUs or on others: frozen models, which read each response once (a reference, a teacher, a reward model),
and critics, which read it once and train on it as the policy does. Copies that follow the policy (its average, a moving
reference) are on its GPUs. All else is small work on CPUs. `roles_of` refuses any other work by name: a plan without
it would be wrong, not approximate.

`trained_rollouts` finds the generators whose rollouts reach an optimiser; other rollouts serve as baselines.
`assumptions` says in words what a plan assumes about work that the program does not specify.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock.graph.context import Context
from penstock.graph.ir import Argument, Graph, Node
from penstock.graph.types import LoraPolicy
from penstock.runtime.cluster.placement import begun_shares, cutter_of, decodes, most_prefixes, samples_of
from penstock.runtime.plan.model_shape import Shape, ShapeError
from penstock.runtime.plan.workload import Lengths, Workload

# The default share of the groups that filters keep, and the default seconds of an environment's turn.
KEPT, ENVIRONMENT_S = 0.7, 1.0


class PlanError(ValueError):
    """No plan can be made. The message says what was given, what is needed, and where."""


@dataclass(frozen=True)
class Models:
    """The work beside the policy's own steps. Each of the `frozen` models and `critics` makes one pass over each
    response; critics also train on it. `rereads` are further passes on the trainer's GPUs, by the policy before its
    update or by a copy. `copies` follow the policy in the trainer's pool; an update changes `followed` of them on
    average."""

    frozen: int = 1
    critics: int = 0
    rereads: int = 0
    copies: int = 0
    followed: float = 0.0

    @property
    def count(self) -> int:
        """The number of models beside the policy."""
        return self.frozen + self.critics


@dataclass(frozen=True)
class Buffer:
    """A node that adds up to `take` past groups to an update's own. It holds the newest `capacity` groups, none more
    than `max_age` updates old."""

    node: str
    take: int
    capacity: int
    max_age: int

    def adds(self, batch: int) -> int:
        """How many groups it adds to each update, once it is full."""
        return min(self.take, self.capacity, self.max_age * batch)


@dataclass(frozen=True)
class Roles:
    """The pools by role, and the graph's facts about the work.

    `beside` are the pools of models beside the policy. `reads_groups`: they take each finished group at once, not a
    whole batch. `cycle` names the sequence from one update of the policy to the next: policy, broadcast, decoding node,
    readers, update. `readers`, `learners` and `rereads` are nodes: those that read with a model beside the policy,
    those that train one, and further passes of the policy. `turns` is the number of turns of a conversation with the
    pool `environment`; 1 if there is none.

    `filters` drop groups, and others replace them. `baselines` are nodes that also decode, each with its number of
    samples, but whose responses are not trained on. `buffer` adds past groups. The update of the policy takes its batch
    in parts of `accumulate` groups; 0: whole. `followers` make the next values of copies of the policy.
    `outside` are pools that decode on a slower clock, in parallel with training, on their own machines. `holds` has the
    frozen models and the critics of each pool beside the policy. `begun` is as in `Workload`.
    """

    graph: str
    trainer: str
    generator: str
    beside: tuple[str, ...]
    small: tuple[str, ...]
    nodes: Mapping[str, tuple[str, ...]]
    samples: int
    lag: int
    epochs: int
    minibatches: int
    reads_groups: bool
    cycle: tuple[str, ...]
    models: Models
    readers: tuple[str, ...]
    learners: tuple[str, ...]
    rereads: tuple[str, ...]
    turns: int
    environment: str
    filters: tuple[str, ...] = ()
    baselines: tuple[tuple[str, int], ...] = ()
    buffer: Buffer | None = None
    followers: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    holds: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = field(default_factory=dict)
    accumulate: int = 0
    begun: tuple[float, ...] = ()

    def nodes_of(self, pool: str) -> tuple[str, ...]:
        return self.nodes.get(pool, ())

    def models_of(self, pools: Sequence[str]) -> Models:
        """The models beside the policy that these pools hold together."""
        held = [own for pool, own in self.holds.items() if pool in pools]
        return Models(*(len({name for names in held for name in names[kind]}) for kind in (0, 1)))


def roles_of(graph: Graph) -> Roles:
    """Find the roles of a graph's pools. Raises PlanError for a graph with work that plans do not cover, naming the
    node or the value."""
    # Everything else follows from the node that decodes: its weights, their policy, its update.
    decoder, *baselines = _decoders(graph)
    broadcast = _weights(graph, decoder)
    policy, update = _trained(graph, decoder, broadcast)
    models = [a for a in graph.carried if a.name != policy.name and is_model(graph, a)]
    makers = {a.name: graph[made] for a in models if (made := graph.producer(a.name))}
    copies = [a.name for a in models if a.name in makers and is_copy(a)]
    others = [a.name for a in models if a.name not in copies]
    for argument in models:
        if argument.name in others and argument.name in makers and not argument.type.endswith(":Critic"):
            what = f"{argument.name}, which changes beside {policy.name}"
            raise _uncovered(graph, what, "critics, copies of the policy, and models that are only read")
    fires = [node for node in graph.nodes if node.fires]
    frozen, critics = ([name for name in others if (name in makers) == changes] for changes in (False, True))
    learners, followers = ([makers[name] for name in names] for names in (critics, copies))
    readers = [node for node in graph.nodes if node not in learners and _reads(node, others)]
    # The trainer's GPUs hold the policy and its copies: any other node that reads them makes one more pass there.
    on_trainer = [policy.name, *copies]
    # The update and the followers also read the policy, but are counted separately.
    rereads = [node for node in fires if node not in (update, *followers) and _reads(node, on_trainer)]
    for node in (*followers, *rereads):
        if (node.pool, node.clock) != (update.pool, "update"):
            given = f"{node.name}, which reads {_reads(node, on_trainer)[0]} in pool {node.pool}"
            raise _uncovered(graph, given, f"{update.pool}, once in each update")
    beside = tuple(dict.fromkeys(node.pool for node in (*readers, *learners)))
    sent = [node.name for node in graph.nodes if node.construct == "broadcast"]
    # Per-update nodes that read broadcast weights are measurements, in parallel with training.
    outside = tuple(dict.fromkeys(node.pool for node in fires if node.clock == "update" and _reads(node, sent)))
    buffer = _buffer(graph, update)
    _check_pools(graph, update, decoder, beside, outside)
    _check_groups(graph, readers, baselines)
    if buffer and (more := (*readers, *learners, *rereads)):
        given = f"{buffer.node} beside {more[0].name}, which may read past groups, too"
        raise _uncovered(graph, given, "a buffer without further passes")
    holds = {
        pool: (
            tuple(name for name in frozen if any(node.pool == pool and _reads(node, [name]) for node in readers)),
            tuple(name for name in critics if makers[name].pool == pool),
        )
        for pool in beside
    }
    nodes = {
        pool: tuple(node.name for node in fires if node.pool == pool) for pool in dict.fromkeys(n.pool for n in fires)
    }
    options, names = dict(update.options), tuple(node.name for node in readers)
    begun = tuple(share for node in (decoder, *baselines) for share in begun_shares(graph, node))
    followed = sum(1 / node.every for node in followers)
    return Roles(
        graph=graph.name,
        trainer=update.pool,
        generator=decoder.pool,
        beside=beside,
        small=tuple(pool for pool in nodes if pool not in (update.pool, decoder.pool, *beside, *outside)),
        nodes=nodes,
        samples=samples_of(graph, decoder),
        lag=broadcast.lag or 0,
        epochs=int(options.get("epochs", 1)),
        minibatches=int(options.get("minibatches", 1)),
        reads_groups=bool(readers) and all(node.clock == "group" for node in readers),
        cycle=(policy.name, broadcast.name, decoder.name, *names, update.name),
        models=Models(len(frozen), len(critics), len(rereads), len(copies), followed),
        readers=names,
        learners=tuple(node.name for node in learners),
        rereads=tuple(node.name for node in rereads),
        turns=decoder.turns or 1,
        environment=next((n.pool for n in graph.nodes if n.turns is not None and n != decoder), ""),
        filters=tuple(node.name for node in graph.nodes if node.construct == "keep"),
        baselines=tuple((node.name, samples_of(graph, node)) for node in baselines),
        buffer=buffer,
        followers=tuple(node.name for node in followers),
        outside=outside,
        holds=holds,
        accumulate=update.accumulate,
        begun=begun if any(begun) else (),
    )


def work_of(
    roles: Roles,
    shape: Shape,
    prompts: int,
    lengths: Lengths,
    max_tokens: int,
    *,
    max_prompt: int = Context.max_prompt,
    prompt_tokens: int = 128,
    micro_tokens: int = 16384,
    environment_s: float = ENVIRONMENT_S,
    kept: float = KEPT,
) -> Workload:
    """The workload of an update of `prompts` groups; samples, epochs and minibatches are the program's."""
    if roles.accumulate and prompts % roles.accumulate:
        given = f"{roles.cycle[-1]} in parts of {roles.accumulate} groups, and a batch of {prompts}"
        raise PlanError(f"--batch [indivisible-batch]: given {given}, needed a multiple of {roles.accumulate}")
    return Workload(
        shape,
        prompts,
        roles.samples,
        lengths,
        prompt_tokens,
        roles.epochs,
        roles.minibatches,
        micro_tokens,
        environment_s,
        kept if roles.filters else 1.0,
        sum(samples for _, samples in roles.baselines),
        roles.buffer.adds(prompts) if roles.buffer else 0,
        # No sequence is longer than the model's context.
        min(max_prompt + max_tokens, shape.context or max_prompt + max_tokens),
        prompts // roles.accumulate if roles.accumulate else 1,
        roles.begun,
    )


def with_adapters(shape: Shape, graph: Graph, name: str, rank: int, targets: Sequence[str]) -> Shape:
    """The shape with the adapters that the carried value `name` trains, if it is a policy: those of the program's
    options, else the given ones, else those of its type or of the shape. Raises ShapeError for those that no policy can
    have (as `nodes.open_model.lora_of`)."""
    argument = graph.argument(name)
    kinds = (argument.type, *dict(graph.types).get(argument.type, ())) if argument is not None else ()
    if not any(kind.endswith(":Policy") for kind in kinds):
        return replace(shape, lora=None)
    options = dict(graph.options)
    own = options.get(f"{name}_rank") or rank
    if not own and shape.lora is None and any(kind.endswith(":LoraPolicy") for kind in kinds):
        own = LoraPolicy.rank
    said = options.get(f"{name}_targets") or targets
    said = said if isinstance(said, list | tuple) else ()
    saved, own = shape.lora, own if isinstance(own, int) else 0
    if saved is not None:
        made = shape.with_lora(own or saved.rank, said or saved.targets)
        if made != shape:
            raise ShapeError(f"{shape.name}: given adapters of {saved}, needed those that are asked for: {made.lora}")
        return shape
    if said and not own:
        raise ShapeError(f"LoRA: given targets {' '.join(said)} without a rank, needed --lora RANK, too")
    made = shape.with_lora(own, said)
    side = max(min(made.maps[each]) for each in (made.lora.targets if made.lora else made.maps))
    if own > side:
        given = f"rank {own} for matrices whose shorter sides are at most {side}"
        raise ShapeError(f"LoRA: given {given}, needed at most {side}")
    return made


def trained_rollouts(graph: Graph) -> set[str]:
    """The nodes whose rollouts reach a per-update node as rollouts, possibly through filters and buffers."""
    reached: set[str] = set()
    # Backwards from the inputs of updates, as long as they are rollouts.
    pending = [item for n in graph.nodes if n.fires and n.clock == "update" for item in n.inputs]
    while pending:
        item = pending.pop()
        if item.ref.node not in graph or item.ref.node in reached or not item.type.endswith(":Rollouts"):
            continue
        maker = graph[item.ref.node]
        reached.add(maker.name)
        if maker.construct == "keep":  # an output of a filter is the input at the same place
            at = [output.name for output in maker.outputs].index(item.ref.output)
            pending.append(replace(maker.inputs[at], type=item.type))
        else:
            pending += maker.inputs
    return reached


def is_model(graph: Graph, argument: Argument) -> bool:
    """True for a model; other values are small, such as a curriculum's knowledge of its prompts."""
    # A type that the graph does not describe may be a model: a plan must not leave it out.
    bases = dict(graph.types).get(argument.type)
    return bases is None or any(base.endswith(":Model") for base in bases)


def is_copy(argument: Argument) -> bool:
    return argument.type.endswith(":Average")


def _reads(node: Node, names: Sequence[str]) -> list[str]:
    """Which of these values a node reads."""
    return [item.ref.node for item in node.inputs if item.ref.node in names]


def _weights(graph: Graph, decoder: Node) -> Node:
    """The broadcast that a decoding node reads."""
    sources = (graph[i.ref.node] for i in decoder.inputs if i.ref.node in graph)
    return next(source for source in sources if source.construct == "broadcast")


def _trained(graph: Graph, decoder: Node, broadcast: Node) -> tuple[Argument, Node]:
    """The policy, and the node that makes its next value."""
    policy = graph.argument(broadcast.inputs[0].ref.node)
    maker = graph.producer(policy.name) if policy else None
    if policy is None or maker is None:
        raise _uncovered(graph, f"{decoder.name} decodes with weights that no node updates", "a policy that is trained")
    if is_copy(policy):
        raise _uncovered(graph, f"{decoder.name} decodes with {policy.name}, a copy", "the policy itself")
    return policy, graph[maker]


def _decoders(graph: Graph) -> list[Node]:
    """The decoding node whose responses are trained on, followed by those whose responses only serve as baselines."""
    found = [node for node in graph.nodes if decodes(graph, node)]
    if not found:
        raise _uncovered(graph, "no node that decodes: there is nothing to share GPUs with", "one that generates")
    # A single generator counts as trained on, even if its responses reach the update in another form.
    trained = [node for node in found if len(found) == 1 or node.name in trained_rollouts(graph)]
    names = ", ".join(node.name for node in found)
    if len(trained) != 1:
        given = f"{len(found)} nodes that decode with broadcast weights ({names}), {len(trained)} of them to learn from"
        raise _uncovered(graph, given, "exactly one whose responses are learnt from")
    first = trained[0]
    others = [node for node in found if node != first]
    for node in found:
        cutter = cutter_of(graph, node)
        if cutter is not None and not most_prefixes(cutter):
            given = f"{cutter.name}, which makes prefixes, without an option `most`"
            raise _uncovered(graph, given, "one that says how many prefixes a response has at most")
    for node in others:
        if node.pool != first.pool or _weights(graph, node) != _weights(graph, first) or node.turns or first.turns:
            given = f"{node.name} in pool {node.pool} beside {first.name}"
            raise _uncovered(graph, given, f"pool {first.pool}, the same broadcast, and no turns")
    return [first, *others]


def _buffer(graph: Graph, update: Node) -> Buffer | None:
    """The buffer of an update, if there is one. Raises PlanError for other stateful per-update nodes, and for several
    buffers."""
    found = [node for node in graph.nodes if node.fires and node.clock == "update" and node.stateful]
    for node in found:
        # The planner recognises a buffer by these options, not by its name.
        given_sizes = (dict(node.options).get(name) for name in ("take", "capacity", "max_age"))
        sizes = [size for size in given_sizes if isinstance(size, int)]
        if len(sizes) < 3 or len(found) > 1 or node.pool != update.pool:
            given = f"{node.name}, which gives an update other groups than its own"
            raise _uncovered(graph, given, f"one buffer in pool {update.pool}, with take, capacity and max_age")
        return Buffer(node.name, *sizes)
    return None


def _check_pools(graph: Graph, update: Node, decoder: Node, beside: tuple[str, ...], outside: tuple[str, ...]) -> None:
    """Require that each kind of work has its own pools, and that delayed values are small."""
    if update.pool == decoder.pool:
        raise _uncovered(graph, f"{update.name} and {decoder.name} share pool {update.pool}", "a pool for each")
    if clash := {update.pool, decoder.pool} & set(beside):
        raise _uncovered(graph, f"a model beside the policy in pool {clash.pop()}", "a pool of its own for it")
    if clash := {update.pool, decoder.pool, *beside} & set(outside):
        raise _uncovered(graph, f"a slower clock that reads weights in pool {clash.pop()}", "a pool of its own for it")
    for node in graph.nodes:
        argument = graph.argument(node.inputs[0].ref.node) if node.construct == "delay" else None
        if argument and is_model(graph, argument):
            raise _uncovered(graph, f"{node.name}, which delays {argument.name}", "broadcasts of models")


def _check_groups(graph: Graph, readers: Sequence[Node], baselines: Sequence[Node]) -> None:
    """Require that models beside the policy read exactly the groups of an update."""
    kept = [node.name for node in graph.nodes if node.construct == "keep"]
    for node in readers:
        if kept and node.clock == "group" and not _reads(node, kept):
            raise _uncovered(graph, f"{node.name}, which reads groups that are dropped later", "it behind the filter")
        if _reads(node, [baseline.name for baseline in baselines]):
            raise _uncovered(graph, f"{node.name}, which reads a baseline's responses", "those that are learnt from")


def _uncovered(graph: Graph, given: str, needed: str) -> PlanError:
    return PlanError(f"{graph.name}: plans do not cover this program: given {given}, needed {needed}")


def assumptions(roles: Roles, work: Workload) -> tuple[str, ...]:
    """Sentences on filters, baselines, buffers, parts and slower clocks; none for a program without them."""
    said = []
    if roles.filters:
        many = f"{work.drawn} are drawn for the {work.prompts} of an update"
        said.append(f"{', '.join(roles.filters)} leaves {work.kept:.0%} of the groups (--kept), so that {many}")
    begun = roles.begun[roles.samples :]
    for node, samples in roles.baselines:
        shares, begun = begun[:samples], begun[samples:]
        more = f"{samples} more response{'s' if samples > 1 else ''}"
        length = "as long as those that are learnt from"
        if any(shares):
            left = 1 - sum(shares) / samples
            length = (
                f"which go on from prefixes that are in the cache ({left:.0%} of each is new, on average), beside them"
            )
        said.append(f"{node} makes {more} to each prompt, {length}")
    if roles.buffer is not None:
        said.append(f"{roles.buffer.node} adds {work.replayed} past groups to each update, as long as fresh ones")
    if roles.accumulate:
        parts = f"parts of {roles.accumulate} group{'s' * (roles.accumulate > 1)} as they arrive"
        said.append(f"{roles.cycle[-1]} takes its batch in {parts}; on GPUs that it shares with the generator, at once")
    apart = "decodes on machines of its own, which are not of this plan, and nobody waits for it"
    return (*said, *(f"{pool} {apart}" for pool in roles.outside))

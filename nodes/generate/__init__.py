"""Nodes that sample responses: `generate`, conversations with an environment (`converse`), and a model that answers a
model (`reply`).

`reply` is the other side of a conversation, the second node of `alternate`. Nothing is learnt from its replies, so it
keeps no tokens: it keeps the conversation as texts, which its own tokenizer encodes again in each turn.

Shapes: N rows, each a conversation.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import torch

from penstock.graph import alternate, node, requires
from penstock.graph.context import Context
from penstock.graph.engines import ENGINES, OURS, EngineName
from penstock.graph.errors import Fault, GraphError
from penstock.graph.imports import load
from penstock.graph.ir import PRECISIONS
from penstock.graph.node import NodeDef, fire
from penstock.graph.requires import Call
from penstock.graph.types import Mean, Metrics, Prefixes, Prompts, Replies, Rollouts, Weights
from penstock.nodes.generate.conversation import SampledGroup, SampledRow, never_said
from penstock.nodes.generate.engine import Engine
from penstock.nodes.generate.engines import can_decode, engine_of
from penstock.nodes.generate.groups import GroupStream
from penstock.nodes.generate.kv_cache import room
from penstock.nodes.generate.sampling import Sampler, scorable
from penstock.nodes.open_model import computes, same_words, spec_of
from penstock.nodes.option_checks import count, not_negative, positive, share


def open_engine(
    context: Context,
    *,
    engine: str = "",
    samples: int = 8,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    stop: tuple[str, ...] = (),
    learn_prefix: bool = False,
) -> GroupStream:
    """The engine that a call of `generate` names, or else the run. Raises ImportError if it is not installed."""
    # By its path: another engine's file imports a package that may not be installed here.
    kind: type[GroupStream] = load(ENGINES[engine_of(context, engine)].stream)
    return kind(context, Sampler(temperature, top_k, top_p), samples, stop, context.segment, learn_prefix)


def make_engine(context: Context, **options: Any) -> Engine:
    """Our own engine, for any engine of the run; `options` are those of `open_engine`."""
    made = open_engine(context, engine=OURS, **options)
    assert isinstance(made, Engine)
    return made


def can_stop(call: Call) -> None:
    """Requirement of a node that samples: its model can generate each of its stop strings. Raises GraphError."""
    given = call.options.get("stop", ())
    texts = given if isinstance(given, (tuple, list)) else [given]
    spec = spec_of(call, "behaviour") if texts else None
    tokenizer, most = (None, 0) if spec is None or call.context is None else (spec.tokenizer, call.context.max_tokens)
    told = [(text, never_said(text, tokenizer, most)) for text in texts]
    if faults := [(text, needed) for text, needed in told if needed]:
        what, where = f"{call.what}: option 'stop'", call.node.where
        raise GraphError(*(Fault("stop-never-matches", what, repr(text), needed, where) for text, needed in faults))


def one_turn(call: Call) -> None:
    """Requirement of a node that continues prefixes: it samples one turn, and `learn_prefix` is given with prefixes
    only, which are sampled as its own responses are. Raises GraphError."""
    given = "after" not in call.left_out
    if given and call.node.turns is not None:
        needed = "responses of one turn: no prefix says what an environment had replied"
        raise call.lack("prefixes in a conversation", needed, input="after", code="prefix-in-conversation")
    if not call.options.get("learn_prefix"):
        return
    if not given:
        raise call.lack("True without prefixes", "prefixes, as the input `after`", "learn_prefix", code="missing-input")
    sources = [dict(call.view.nodes[step].options) for step in call.behind("after")]
    for name in ("temperature", "top_k", "top_p"):
        own, others = call.options[name], [source.get(name, call.options[name]) for source in sources]
        # Only if all differ: which rows become prefixes is known in the run alone.
        if others and own not in others:
            said = " or ".join(map(repr, dict.fromkeys(others)))
            raise call.lack(repr(own), f"{said}, of the prefixes: what is learnt from is sampled as its row is", name)


@requires(
    room,
    same_words,
    one_turn,
    not_negative("temperature"),
    count(0, "top_k"),
    share("top_p"),
    positive("top_p"),
    scorable,
    can_stop,
    computes,
    can_decode,
)
@node(pool="generator", init=open_engine)
def generate(
    stream: GroupStream,
    prompts: Prompts,
    behaviour: Weights,
    conversation: Rollouts | None = None,
    replies: Replies | None = None,
    after: Prefixes | None = None,
    *,
    samples: int = 8,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    stop: tuple[str, ...] = (),
    learn_prefix: bool = False,
    engine: Literal["", EngineName] = "",
) -> tuple[GroupStream, Rollouts, Metrics]:
    """`samples` responses to each prompt, sampled token by token with the live weights.

    The model, with its shape and tokenizer, is that of the carried value whose weights `behaviour` is.

    The recorded log-probabilities are those of the distribution that was sampled from (see `Sampler`). The temperature
    is stored with the rollouts, and updates and other nodes that score them apply it: the policy is always
    softmax(logits / temperature). Rollouts of temperature 0, and of `top_k` or `top_p`, cannot be scored: `check`
    refuses a program in which an update of a policy learns from them (see `scorable`). A response ends with a stop
    token, with the token that completes a text of `stop`, or after `max_tokens`. A stop string stays in the text, with
    the rest of its last token; a stop token does not.

    With a `conversation` (this node's output of the previous turn) and the environment's `replies` to it, each row that
    is not done continues for another turn of at most `max_tokens`, after its tokens as they were sampled and those of
    the reply; done rows pass through. A row without room for the reply and a turn (see `max_prefix` in `groups.py`)
    ends as it was, with `finished_N` False, so an environment should treat an unfinished row as done. The output is the
    whole conversation each time; `converse` plays all turns. With `--segment N` the group pauses when each of its rows
    has ended or has N more tokens, and continues later.

    `after` some prefixes (`cut` makes them) it samples `samples` responses that begin with the tokens of each:
    `max_tokens` bounds prefix and continuation together, and texts are of both. Each prefix draws by its own number,
    also if two have equal tokens. Its tokens keep log μ and versions, and nothing is learnt from them unless
    `learn_prefix` is True. A group without a prefix gets no rows.

    Metrics: `generated_tokens` (of the turn), `response_length` (tokens of a row in it), `stale_cache` (share of tokens
    whose cache holds entries of older weights), from the second turn on `outgrown` (share of rows that ended for lack
    of room), and once per batch, for its first group or else the next one that only the live weights have sampled,
    `mismatch` (mean |difference| to the trainer's log-probabilities at equal weights, nats; not for weights sent in
    eight bits).

    `engine` is the engine that samples; "" is that of the run (`--engine`).
    """
    given = samples, Sampler(temperature, top_k, top_p), tuple(stop), learn_prefix
    made = stream.samples, stream.sampler, stream.stop, stream.learn_prefix
    if given != made:
        raise ValueError(f"generate: given {given}, needed the options that its engine was made with: {made}")
    inputs = {"prompts": prompts, "behaviour": behaviour, "conversation": conversation, "replies": replies}
    inputs["after"] = after
    rollouts, metrics = fire(stream, inputs)
    return stream, rollouts, metrics


Replied = TypeVar("Replied")


def converse(
    prompts: Prompts,
    behaviour: Weights,
    *,
    environment: NodeDef[..., Replied],
    turns: int | None = None,
    samples: int = 8,
    **options: Any,
) -> tuple[Rollouts, Replied]:
    """`samples` conversations for each prompt, of at most `turns` turns of the model.

    After each turn `environment` (a node from Rollouts to Replies, first input and first output) reads the
    conversations so far and replies; rows that it marks as done end, the others continue. `options` are those of
    `generate` (temperature, …) and of the environment, assigned by name. Returns the whole conversations and the
    environment's last outputs: `texts` of the Rollouts has each row's newest turn, `transcripts` all turns.

        rollouts, replies = converse(prompts, behaviour, environment=python_tool, turns=4, seconds=2.0)
        rewards = score(rollouts, by=math_answer)
    """
    return alternate(generate, environment, prompts, behaviour, turns=turns, samples=samples, **options)


# (a row's prompt, the other side's first turn, the reference answer) → the first message to the model that answers.
Ask = Callable[[str, str, str], str]


def as_said(prompt: str, response: str, answer: str) -> str:
    """The other side's first turn, unchanged."""
    return response


class Replier(Engine):
    """State of `reply`: an engine with one sample, whose rows are conversations as the answering side sees them."""

    def __init__(
        self,
        context: Context,
        sampler: Sampler,
        ask: Ask = as_said,
        over: Callable[[str], bool] | None = None,
        reward: Callable[[str], float] | None = None,
        role: str = "user",
    ) -> None:
        super().__init__(context, sampler)
        self.ask, self.over, self.reward, self.role = ask, over, reward, role

    def submit(self, tag: Any, inputs: Mapping[str, Any]) -> None:
        """Answer the newest turn of each row that is not over; `earlier` are the replies of the previous turn."""
        rollouts, earlier = inputs["rollouts"], inputs.get("earlier")
        rows = [self._heard(rollouts, earlier, row) for row in range(len(rollouts))]
        prompts = Prompts(rollouts.ordinals, rollouts.prompts, rollouts.answers)
        self.enqueue(SampledGroup(tag, prompts, 1, rows, earlier), inputs["behaviour"])

    def _heard(self, rollouts: Rollouts, earlier: Replies | None, row: int) -> SampledRow:
        """The conversation of a row as this side sees it; if it is over, a closed row with an empty text."""
        first, *others = transcript = rollouts.transcripts[row]
        # If the other side had no room for another turn, its transcript does not end with our reply and its answer.
        if earlier is None or not (earlier.done_N[row] or transcript[-2:-1] != [earlier.texts[row]]):
            opening = self.ask(rollouts.prompts[row], first, rollouts.answers[row])
            tokens = self.tokenizer.encode_dialogue([opening, *others])
            if 0 < len(tokens) <= self.max_prefix:
                return SampledRow(tokens)
        return SampledRow([0], transcript=[""], open=False)

    def result(self, group: SampledGroup) -> tuple[Replies, Metrics]:
        """The replies of a turn. A row that is not answered keeps its last reply and reward."""
        # Nothing is learnt from replies, so their mismatch is not measured.
        made, earlier = group.rollouts(self.tokenizer, self.sampler).texts, group.earlier
        answered = [row.open for row in group.rows]
        kept = made if earlier is None else earlier.texts
        texts = tuple(new if now else old for new, old, now in zip(made, kept, answered, strict=True))
        done = [
            not (now and text) or (self.over is not None and bool(self.over(text)))
            for text, now in zip(texts, answered, strict=True)
        ]
        rewards_N = None
        if self.reward is not None:
            before_N = None if earlier is None else earlier.rewards_N
            rewards_N = torch.zeros(len(texts)) if before_N is None else before_N.clone()
            for row in (row for row, now in enumerate(answered) if now):
                rewards_N[row] = float(self.reward(texts[row]))
        replies = Replies(texts, (self.role,) * len(texts), torch.tensor(done), rewards_N)
        sampled = group.metrics()
        figures: Metrics = {"answered": Mean.of(answered), "generated_tokens": sampled["generated_tokens"]}
        if any(answered):
            figures["reply_length"] = sampled["response_length"]
        return replies, figures


def make_replier(
    context: Context, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, **answers: Any
) -> Replier:
    return Replier(context, Sampler(temperature, top_k, top_p), **answers)


@requires(room, not_negative("temperature"), count(0, "top_k"), share("top_p"), positive("top_p"), computes)
@node(pool="generator", init=make_replier)
def reply(
    replier: Replier,
    rollouts: Rollouts,
    behaviour: Weights,
    earlier: Replies | None = None,
    *,
    ask: Ask = as_said,
    over: Callable[[str], bool] | None = None,
    reward: Callable[[str], float] | None = None,
    role: Literal["user", "tool"] = "user",
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> tuple[Replier, Replies, Metrics]:
    """A model's replies to the newest turn of each conversation: the node that answers as `generate.of(judge)`.

    It sees the conversation from the other side, with its own tokenizer and chat template: the rollouts' model is the
    user, and its own replies are the assistant's. The first message is `ask(prompt, response, answer)`, of a row's
    prompt, first turn and reference answer; by default it is that turn alone. A reply has at most `max_tokens` tokens,
    and the rollouts' model gets it as `role`.

    A row is done if `over(reply)` is true, if the reply is empty, or if the conversation does not fit the context;
    without `over` the bound on turns ends it. `reward(reply)`, of the newest reply, is the reward of the conversation
    so far, and 0 for a row that was never answered; without `reward` there is none. Metrics: `reply_length` (tokens),
    `answered` (share of rows that got a reply in this turn), `generated_tokens`.
    """
    made = (replier.ask, replier.over, replier.reward, replier.role)
    if made != (ask, over, reward, role):
        raise ValueError("reply: given other options than those that its state was made with, needed the same")
    replies, metrics = fire(replier, {"rollouts": rollouts, "behaviour": behaviour, "earlier": earlier})
    return replier, replies, metrics


# `generate.of(judge)` as the second node of `alternate` is this node with the judge's weights.
generate.answering = reply
generate.precisions = reply.precisions = PRECISIONS

"""A model that answers a model: it sees the conversation from the other side, in its own tokens."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from penstock.graph import GraphError, alternate, broadcast, program, trace
from penstock.graph.types import Context, Policy, Prompts, Replies, Rollouts, Weights
from penstock.nodes.generate import as_said, generate, make_engine, make_replier, reply
from penstock.nodes.open_model import open_model
from penstock.nodes.tokenizer import byte_tokenizer

CONTEXT = Context(node="reply", seed=3, data="by bytes", max_tokens=5, slots=8, options={"max_prompt": 60})


def asked(prompt: str, response: str, answer: str) -> str:
    return f"{prompt}|{response}|{answer}"


def weights() -> Weights:
    model, _ = open_model(CONTEXT)
    return Weights(0, dict(model.named_parameters()))


def rollouts(*transcripts: list[str]) -> Rollouts:
    """Conversations of one group; the tokens are none that the model that answers would know."""
    count = len(transcripts)
    return Rollouts(
        ordinals=(7,) * count,
        prompts=tuple(f"p{row}" for row in range(count)),
        answers=tuple(str(row) for row in range(count)),
        texts=tuple(transcript[-1] for transcript in transcripts),
        tokens_NS=torch.full((count, 4), 10**6),
        prompt_lengths_N=torch.ones(count, dtype=torch.long),
        response_lengths_N=torch.full((count,), 3),
        logprobs_NT=torch.zeros(count, 3),
        versions_NT=torch.zeros(count, 3, dtype=torch.long),
        finished_N=torch.ones(count, dtype=torch.bool),
        transcripts=transcripts,
    )


def answered(
    said: Rollouts,
    earlier: Replies | None = None,
    context: Context = CONTEXT,
    over: Callable[[str], bool] | None = None,
    reward: Callable[[str], float] | None = None,
) -> Replies:
    replier = make_replier(context, ask=asked, over=over, reward=reward, temperature=0.0)
    _, replies, _ = reply.fn(replier, said, weights(), earlier, ask=asked, over=over, reward=reward, temperature=0.0)
    assert isinstance(replies, Replies)
    assert not replier.busy()
    assert not replier.asked
    return replies


def generated(*texts: str) -> tuple[str, ...]:
    """What the same model says to the texts, asked one by one."""
    prompts = Prompts(tuple(range(len(texts))), texts, ("",) * len(texts))
    engine = make_engine(replace(CONTEXT, node="generate"), samples=1, temperature=0.0)
    _, made, _ = generate.fn(engine, prompts, weights(), samples=1, temperature=0.0)
    assert isinstance(made, Rollouts)
    return made.texts


def test_the_first_turn_is_answered_as_the_question_that_it_makes() -> None:
    replies = answered(rollouts(["12"], ["?"]))
    assert replies.texts == generated("p0|12|0", "p1|?|1")
    assert (replies.roles, replies.done_N.tolist(), replies.rewards_N) == (("user", "user"), [False, False], None)


def test_a_later_turn_is_answered_in_view_of_all_before() -> None:
    earlier = Replies(("yes", "no"), ("user", "user"), torch.tensor([False, False]))
    replies = answered(rollouts(["12", "yes", "13"], ["?", "no", "!"]), earlier)
    assert replies.texts == generated("p0|12|0yes13", "p1|?|1no!")


def test_rows_that_are_over_or_did_not_go_on_keep_their_reply_and_their_reward() -> None:
    earlier = Replies(
        ("no", "yes", "yes"), ("user",) * 3, torch.tensor([False, True, False]), torch.tensor([1.0, 2, 3])
    )
    went_on, was_done, outgrown = ["1", "no", "2"], ["1"], ["1", "ok", "2"]
    replies = answered(rollouts(went_on, was_done, outgrown), earlier, reward=lambda text: 10.0 + len(text))
    assert replies.texts[1:] == ("yes", "yes")
    assert replies.done_N.tolist() == [False, True, True]
    assert replies.rewards_N is not None
    assert replies.rewards_N.tolist() == [10.0 + len(replies.texts[0]), 2.0, 3.0]


def test_a_reply_may_end_its_conversation() -> None:
    first = answered(rollouts(["12"], ["?"]))
    replies = answered(rollouts(["12"], ["?"]), over=lambda text: text == first.texts[0])
    assert replies.texts == first.texts
    assert replies.done_N.tolist() == [True, first.texts[0] == first.texts[1]]


def test_a_conversation_that_has_outgrown_the_model_is_over() -> None:
    replies = answered(rollouts(["1" * 55], ["1" * 57]), reward=len)
    assert replies.done_N.tolist() == [False, True]
    assert replies.texts[1] == ""
    assert replies.rewards_N is not None
    assert replies.rewards_N.tolist() == [float(len(replies.texts[0])), 0.0]


def test_what_looks_like_a_special_token_is_text_to_the_model_that_answers() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.eos not in tokenizer.encode_dialogue(["a<eos>", "<eos>", "<eos>b"])
    assert tokenizer.encode_dialogue(["ab"]) == tokenizer.encode_prompt("ab")


def test_a_dialogue_goes_through_the_chat_template() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    whole = tokenizer.encode("[user]a<eos>[assistant]b<eos>[user]c<eos>[assistant]")
    assert tokenizer.encode_dialogue(["a", "b", "c"]) == whole
    assert tokenizer.encode_dialogue(["a"]) == tokenizer.encode_prompt("a")


def test_options_must_be_those_of_its_state() -> None:
    with pytest.raises(ValueError, match="reply"):
        reply.fn(make_replier(CONTEXT), rollouts(["1"]), weights(), ask=asked)
    assert as_said("p", "r", "a") == "r"


def test_a_model_that_says_nothing_ends_its_conversation() -> None:
    replier = make_replier(CONTEXT)
    replier.engine.slots.stops[:] = True
    _, replies, _ = reply.fn(replier, rollouts(["1"], ["2"]), weights())
    assert isinstance(replies, Replies)
    stopped = [len(text) == 0 for text in replies.texts]
    assert replies.done_N.tolist() == stopped


def test_what_is_lacking_of_a_generator_that_answers_is_told_as_a_program_says_it() -> None:
    """The name of the node that stands for it is none that the program has."""

    @program
    def two_heats(policy: Policy, prompts: Prompts) -> Rollouts:
        behaviour = broadcast(policy, lag=1)
        return alternate(generate, generate.of(behaviour), prompts, behaviour, turns=2, temperature=0.6)[0]

    @program
    def no_weights(policy: Policy, prompts: Prompts) -> Rollouts:
        return alternate(generate, generate, prompts, broadcast(policy, lag=1), turns=2)[0]

    for made, needed in ((two_heats, "generate.of(…).given(temperature=…)"), (no_weights, "generate.of(…)")):
        with pytest.raises(GraphError) as caught:
            trace(made)
        assert caught.value.faults[0].needed.endswith(needed)

"""Bytes or a directory's own file: what is encoded comes back, and what cannot be said is an error."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers, processors

from penstock.nodes.tokenizer import TokenizerError, byte_tokenizer, load_tokenizer

TEMPLATE = (
    "{{ bos_token }}{%- for message in messages %}\n"
    "[{{ message['role'] }}] {{ message.content | trim }} {{ {'a': 'é<'} | tojson }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def words_folder(folder: Path, **changes: Any) -> Path:
    """A directory with a word-level tokenizer that begins each text with <s>."""
    vocab = {
        word: i for i, word in enumerate(["<s>", "</s>", "<end>", "what", "is", "two", "[", "]", "user", "assistant"])
    }
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="two"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>", "<end>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **changes}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_bytes_are_their_own_tokens() -> None:
    tokenizer = byte_tokenizer()
    text = "37+58=\n é 数 \x00"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode([*tokenizer.encode(text), tokenizer.eos, tokenizer.pad]) == text
    assert (tokenizer.vocab_size, tokenizer.eos, tokenizer.pad) == (258, 256, 257)


def test_an_alphabet_gives_a_small_vocabulary() -> None:
    tokenizer = byte_tokenizer("0123456789+-=")
    assert tokenizer.vocab_size == 16
    assert tokenizer.decode(tokenizer.encode("37+58=")) == "37+58="
    assert tokenizer.encode_prompt("0") == tokenizer.encode("0")


def test_what_the_alphabet_lacks_is_an_error() -> None:
    with pytest.raises(TokenizerError, match=r"given '37\*58', needed a text without '\*'"):
        byte_tokenizer("0123456789").encode("37*58")


def test_a_saved_tokenizer_comes_back_equal(tmp_path: Path) -> None:
    for index, tokenizer in enumerate((byte_tokenizer(), byte_tokenizer("ab <>"))):
        tokenizer.template, tokenizer.stops = "{{ messages[0].content }}", (tokenizer.eos, 0)
        tokenizer.save(tmp_path / str(index))
        again = load_tokenizer(tmp_path / str(index))
        assert again.encode("ab <eos> ba") == tokenizer.encode("ab <eos> ba")
        assert (again.stops, again.pad, again.template) == (tokenizer.stops, tokenizer.pad, tokenizer.template)
        assert again.vocab_size == tokenizer.vocab_size


def test_transformers_reads_what_is_saved(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    byte_tokenizer().save(tmp_path)
    other = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert other.encode("12 + é") == byte_tokenizer().encode("12 + é")
    assert (other.eos_token_id, other.pad_token_id) == (256, 257)


def test_a_prompt_begins_as_the_model_wants_it_and_a_response_does_not(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(words_folder(tmp_path))
    assert tokenizer.encode_prompt("what is") == [0, 3, 4]
    assert tokenizer.encode("what is") == [3, 4]
    assert (tokenizer.stops, tokenizer.pad) == ((1,), 1)


def test_a_response_may_end_in_several_ways(tmp_path: Path) -> None:
    folder = words_folder(tmp_path, pad_token={"content": "<end>"})
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 1]}))
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.stops, tokenizer.eos, tokenizer.pad) == ((1, 2), 1, 2)


@pytest.mark.parametrize("place", ["tokenizer_config.json", "a list", "chat_template.jinja"])
def test_a_chat_template_gives_the_same_prompt_as_transformers(tmp_path: Path, place: str) -> None:
    transformers = pytest.importorskip("transformers")
    listed = [{"name": "default", "template": TEMPLATE}, {"name": "other", "template": "x"}]
    given: dict[str, Any] = {"tokenizer_config.json": {"chat_template": TEMPLATE}, "a list": {"chat_template": listed}}
    folder = words_folder(tmp_path, **given.get(place, {}))
    if place == "chat_template.jinja":
        (folder / place).write_text(TEMPLATE)
    tokenizer = load_tokenizer(folder)
    message = [{"role": "user", "content": " what is "}]
    other = transformers.AutoTokenizer.from_pretrained(folder)
    expected = other.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    assert tokenizer.render(" what is ") == expected
    assert tokenizer.encode_prompt("what is")[:2] == [0, 6]
    assert tokenizer.encode_prompt("what is").count(0) == 1


def test_a_template_can_do_no_harm(tmp_path: Path) -> None:
    folder = words_folder(tmp_path, chat_template="{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(TokenizerError, match="chat template"):
        load_tokenizer(folder).encode_prompt("what")
    folder = words_folder(tmp_path, chat_template="{{ raise_exception('only system messages') }}")
    with pytest.raises(TokenizerError, match="only system messages"):
        load_tokenizer(folder).encode_prompt("what")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (b"{% for m in messages %}", "chat template: Unexpected end of template"),
        (b"{{ foo.bar }}", "chat template: 'foo' is undefined"),
        (b"{{ 1 + messages[0].content }}", "chat template: TypeError: unsupported operand"),
        (b"{% for i in range(10 ** 9) %}x{% endfor %}", "chat template: OverflowError: Range too big"),
        (b"hello", "given 'hello' for every question, needed the question in it"),
        (b"\xff\xfe", r"chat_template\.jinja: cannot be read: 'utf-8' codec"),
    ],
)
def test_a_template_that_cannot_say_a_question_is_refused_with_its_directory(
    tmp_path: Path, template: bytes, said: str
) -> None:
    byte_tokenizer().save(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(template)
    with pytest.raises(TokenizerError, match=rf"{re.escape(str(tmp_path))}.*{said}"):
        load_tokenizer(tmp_path)


def test_a_directory_without_any_tokenizer_is_read_by_bytes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 300, "eos_token_id": 2}))
    assert load_tokenizer(tmp_path).stops == (256,)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 100}))
    with pytest.raises(
        TokenizerError, match=r"no tokenizer\.json and a vocabulary of 100, needed the file, or at least 258"
    ):
        load_tokenizer(tmp_path)


def test_a_tokenizer_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_text("sentencepiece")
    with pytest.raises(TokenizerError, match=r"given tokenizer\.model, needed tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: cannot be read"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("generation_config.json", "[3]", r"generation_config\.json: given JSON of a list, needed an object"),
        ("tokenizer_config.json", '{"eos_token": 3}', "given eos_token 3, needed a text"),
        ("tokenizer_config.json", '{"eos_token": {"id": 3}}', r"given eos_token \{'id': 3\}, needed a text"),
        ("generation_config.json", '{"eos_token_id": "x"}', "given eos_token_id 'x', needed a token's number"),
        ("generation_config.json", '{"eos_token_id": 99}', "given eos_token_id 99, needed one of the 5 of tokenizer"),
        ("config.json", '{"vocab_size": 3, "eos_token_id": 0}', "given token 4, needed tokens below 3, the vocab"),
    ],
)
def test_what_a_tokenizers_files_say_wrongly_is_named(tmp_path: Path, file: str, text: str, said: str) -> None:
    byte_tokenizer("ab").save(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / file).write_text(text)
    with pytest.raises(TokenizerError, match=said):
        load_tokenizer(tmp_path)


def test_a_reply_is_plain_text_without_a_template() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.encode_reply("a<eos>", "tool", after_stop=True) == list(b"a<eos>")
    assert tokenizer.encode("a<eos>") == [97, tokenizer.eos]


def test_a_reply_goes_through_the_template_and_says_no_stop_token_twice(tmp_path: Path) -> None:
    """What follows the model's turn in the template: its end, the reply as its role says, and the next beginning."""
    template = (
        "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}{{ raise_exception('no') }}{% endif %}"
        "{{ m.content }}{{ '<end>' if m.role == 'assistant' else ' is ' }}{% endfor %}what"
    )
    tokenizer = load_tokenizer(words_folder(tmp_path, chat_template=template, eos_token="<end>"))
    end, what, is_ = tokenizer.eos, *tokenizer.encode("what is")
    assert tokenizer.encode_reply("what", "user", after_stop=True) == [what, is_, what]
    assert tokenizer.encode_reply("what", "user", after_stop=False) == [end, what, is_, what]
    assert tokenizer.encode_reply("what", "tool", after_stop=True) == [what, is_, what]


def test_a_template_without_a_second_turn_is_an_error(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(words_folder(tmp_path, chat_template="{{ messages[0].content }}"))
    with pytest.raises(TokenizerError, match="needed one that has a 'tool' or user"):
        tokenizer.encode_reply("what", "tool", after_stop=True)

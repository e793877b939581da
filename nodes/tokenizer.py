"""Text to tokens and back: a model directory's own `tokenizer.json`, or, for new models, single bytes.

Both use the `tokenizers` library, so that other tools can read the saved files. A prompt goes through the model's chat
template if it has one; a response never does. A template formats a conversation as the model saw it in training. It is
a program, so it is rendered in a sandbox, as in transformers.
"""

import json
import math
from collections.abc import Iterable, Sequence
from datetime import date
from functools import cached_property, lru_cache, partial
from pathlib import Path
from string import punctuation
from typing import Any, NamedTuple

import tokenizers
from jinja2 import Environment, Template, TemplateError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from penstock.nodes.model.config import read_json, token_ids

EOS, PAD, UNKNOWN = "<eos>", "<pad>", "<unk>"
GENERATION = "generation_config.json"
# Files of a tokenizer that cannot be read here without tokenizer.json.
FILES_OF_OTHERS = ("tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "tokenizer_config.json")
# The beginning of chat messages as a text.
_CHAT = '[{"role": "'
# Placeholders for messages, to find the text that a template puts around them.
_MARKS = "@@question@@", "@@answer@@", '@@"reply"@@'
# What a template gets beside the messages; transformers passes the last two, too.
_BESIDE: dict[str, Any] = {"add_generation_prompt": True, "tools": None, "documents": None}
# A character that stands for no byte.
_BOUND = "\u0100"
# The flag of `variables`.
VARIABLES = "--chat-template-kwargs"


# A message of a chat: its `role` and its `content`.
Message = dict[str, str]


def conversation(messages: Sequence[Message]) -> str:
    """Chat messages as one text for `Tokenizer.encode_prompt`: for a single user message its content, unless that looks
    like the JSON which it is for any others."""
    if [message["role"] for message in messages] == ["user"] and not messages[0]["content"].startswith(_CHAT):
        return messages[0]["content"]
    return json.dumps([{"role": m["role"], "content": m["content"]} for m in messages], ensure_ascii=False)


def messages_of(text: str) -> list[Message]:
    """The chat messages in a text of the form that `conversation` makes; any other text is one user message."""
    plain = [{"role": "user", "content": text}]
    if not text.startswith(_CHAT):
        return plain
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return plain
    wellformed = all(
        isinstance(message, dict)
        and {*message} == {"role", "content"}
        and all(isinstance(v, str) for v in message.values())
        for message in found
    )
    return found if wellformed else plain


class TokenizerError(ValueError):
    """A tokenizer cannot be read, or cannot encode a text: what was given and what is needed."""


class Tokenizer:
    """A tokenizer with its chat template. `stops` are the tokens that end a response; the first one is `eos`. `pad`
    fills rows; without one, other tools can encode no batches. `generation` are the settings of generation_config.json,
    which are kept for other tools. `variables` are those of the chat template that the run gives."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        stops: Sequence[int],
        pad: int | None,
        template: str | None = None,
        special: dict[str, str] | None = None,
        generation: dict[str, Any] | None = None,
        variables: dict[str, Any] | None = None,
    ) -> None:
        self.backend, self.stops, self.pad, self.template = backend, tuple(stops), pad, template
        self.special, self.generation, self.variables = special or {}, generation or {}, variables or {}
        self._unknown = backend.token_to_id(UNKNOWN)
        # Sequences of roles for which the template is known to include the text of each message.
        self._said = set[tuple[str, ...]]()

    @property
    def eos(self) -> int:
        return self.stops[0]

    @cached_property
    def end(self) -> int:
        """The token that ends a demonstration: the special one with which the chat template ends the model's turns, as
        ChatML's `<|im_end|>`; `eos` if there is none."""
        if self.template is None:
            return self.eos
        try:
            after = self._encode(self._frame("user").before)
        except TokenizerError:  # a template of a single turn
            return self.eos
        added = self.backend.get_added_tokens_decoder()
        ends = {
            token for token, word in added.items() if word.special and word.content != self.special.get("bos_token")
        }
        return after[0] if after and after[0] in ends else self.eos

    @property
    def vocab_size(self) -> int:
        """One more than the largest token."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def words(self) -> list[str]:
        """The text of each token alone."""
        return self.backend.decode_batch([[token] for token in range(self.vocab_size)])

    def encode(self, text: str) -> list[int]:
        """The tokens of a text by itself, without any that mark its beginning or end."""
        return self._encode(text)

    def encode_prompt(self, text: str, *, plain: bool = False) -> list[int]:
        """The tokens that a response follows: through the chat template, else with the model's first token if any.

        A text of chat messages (see `conversation`) is rendered as these. `plain`, for a text that others may have
        written: it is one message, and what looks like a special token in it is text. Raises TokenizerError for several
        messages without a chat template.
        """
        messages = messages_of(text)
        # Of others' texts, only one message is taken out of its JSON: the user's own.
        messages = [] if plain and [message["role"] for message in messages] != ["user"] else messages
        roles = tuple(message["role"] for message in messages)
        if messages and roles != ("user",):
            if self.template is None:
                raise TokenizerError(f"given chat messages of {', '.join(roles)}, needed a model with a chat template")
            if roles not in self._said:
                self._require_said(roles)
            return self._encode(self.render(*(message["content"] for message in messages), roles=roles))
        text = messages[0]["content"] if messages else text
        if self.template is None:
            return self._encode(text, begins=True, plain=plain)
        around = self.render(_MARKS[0]).split(_MARKS[0]) if plain and self._says_special(text) else []
        if len(around) == 2:
            return self._in_pieces(around[0], text, around[1])
        return self._encode(self.render(text), plain=plain and self._says_special(text))

    def encode_response(self, text: str) -> list[int]:
        """The tokens of a response as it follows a prompt, without the one that ends it. If the chat template puts a
        space before the model's texts, it is one of them."""
        return self._follows(*self._before_response, text=text)

    @cached_property
    def _before_response(self) -> tuple[str, str]:
        """What the chat template puts before a response, and the space that it puts there in a conversation besides."""
        if self.template is None:
            return "", ""
        before = self.render(_MARKS[0]).rpartition(_MARKS[0])[2]
        try:
            said = self.render(*_MARKS[:2], roles=("user", "assistant"))
        except TokenizerError:  # a template of a single turn
            return before, ""
        space = said.partition(_MARKS[0])[2].partition(_MARKS[1])[0].removeprefix(before)
        return before, space if space.isspace() else ""

    def _require_said(self, roles: tuple[str, ...]) -> None:
        """Raise TokenizerError if the chat template omits the text of a message, as many do for a role that they do not
        know."""
        marks = [f"@@{number}@@" for number in range(len(roles))]
        text = self.render(*marks, roles=roles)
        if lost := [role for role, mark in zip(roles, marks, strict=True) if mark not in text]:
            given = f"chat messages of {', '.join(roles)}, of which the chat template leaves {lost[0]!r} out"
            raise TokenizerError(f"given {given}, needed roles that it knows")
        self._said.add(roles)

    def bound(self, text: str) -> float:
        """An upper bound on the tokens of `encode_prompt`, for the cost of counting bytes: each token encodes at least
        one byte, except those that mark a beginning, and no template changes a question's text. Infinity for a
        tokenizer that normalizes texts first, and for chat messages."""
        # A normalizer may turn one character into many.
        if self.backend.normalizer is not None or text.startswith(_CHAT):
            return math.inf
        return len(text.encode()) + self._around

    @cached_property
    def _around(self) -> int:
        """Bytes of the template around a question, plus special tokens, plus a space in front."""
        words = "" if self.template is None else self.render("")
        return len(words.encode()) + self.backend.num_special_tokens_to_add(is_pair=False) + 1

    def lacks(self, texts: Iterable[str]) -> set[str]:
        """The characters of texts that the tokenizer cannot encode alone. A text that cannot be encoded has one. Each
        different character is encoded once; a tokenizer without a token for unknown text lacks none."""
        if self._unknown is None:
            return set()
        found, known = set[str](), set[str]()
        for text in texts:
            fresh = {*text} - known
            known |= fresh
            found |= {letter for letter in fresh if self._unknown in self.backend.encode(letter).ids}
        return found

    def fewest(self, text: str) -> int:
        """A lower bound on the tokens of a response that contains `text`: exact for byte-level vocabularies, whose
        tokens are bytes one after the other; 1 for all others."""
        # The bytes of U+FFFD are not known: bytes that are no UTF-8 are decoded to it.
        if not isinstance(self.backend.decoder, decoders.ByteLevel) or "\ufffd" in text:
            return 1
        goal, joined = text.encode().decode("latin-1"), self._joined
        if goal in joined:
            return 1
        words, size = set(joined.split(_BOUND)), len(goal)
        longest = min(max(map(len, words)), size - 1)
        # Tokens up to each byte. The first token may say more in front of the text, the last one more behind.
        least = [0, *[size] * (size - 1)]
        for end in range(1, longest + 1):
            if f"{goal[:end]}{_BOUND}" in joined:
                least[end] = 1
        for begin in range(1, size):
            for end in range(begin + 1, min(begin + longest, size - 1) + 1):
                if goal[begin:end] in words:
                    least[end] = min(least[end], least[begin] + 1)
        ends = (begin for begin in range(size - longest, size) if f"{_BOUND}{goal[begin:]}" in joined)
        return min((least[begin] + 1 for begin in ends), default=size)

    @cached_property
    def _joined(self) -> str:
        """The bytes of all tokens of a byte-level vocabulary that have a text, as characters below 256, with bounds
        between them."""
        added = self.backend.get_added_tokens_decoder()
        texts = [
            word for word, token in self.backend.get_vocab().items() if not (token in added and added[token].special)
        ]
        values = {letter: chr(value) for value, letter in enumerate(_byte_letters())}
        # As the decoder does: a token with any other character is a text.
        found = [
            "".join(map(values.__getitem__, text)) if values.keys() >= {*text} else text.encode().decode("latin-1")
            for text in texts
        ]
        return f"{_BOUND}{_BOUND.join(found)}{_BOUND}"

    def encode_reply(self, text: str, role: str, after_stop: bool) -> list[int]:
        """The tokens of an environment's turn in a conversation, from the end of the model's turn to its next one.

        Through the chat template, as `role` ("user" or "tool") or, if the template has no such role, as the user;
        without a template the text alone. `after_stop`: the model's turn has ended with a stop token, which is not
        repeated. What looks like a special token in the text is text.
        """
        if self.template is None:
            return self._follows("", text=text, plain=True)
        frame = self._frame(role)
        if self._says_special(text):
            tokens = self._in_pieces(frame.before, _json_text(text) if frame.as_json else text, frame.after)
        else:
            said = self.render(*_MARKS[:2], text, roles=("user", "assistant", frame.role))
            tokens = self._follows("", text=said.partition(_MARKS[1])[2])
        # The model has sampled this token itself.
        return tokens[1:] if after_stop and tokens and tokens[0] in self.stops else tokens

    def encode_dialogue(self, texts: Sequence[str]) -> list[int]:
        """The tokens that the model's next turn follows. `texts` are turns of the user and of the model, the user's
        first and last. What looks like a special token in them is text."""
        tokens = self.encode_prompt(texts[0], plain=True)
        for own, reply in zip(texts[1::2], texts[2::2], strict=True):
            tokens += self._follows(*self._before_response, text=own, plain=self._says_special(own))
            tokens += self.encode_reply(reply, "user", after_stop=False)
        return tokens

    def _says_special(self, text: str) -> bool:
        """True if something in a text looks like a special token."""
        return self._encode(text) != self._encode(text, plain=True)

    def _in_pieces(self, before: str, text: str, after: str) -> list[int]:
        """The tokens of a text within parts of the chat template. Special tokens are found in these parts only."""
        return [*self._encode(before), *self._follows("", text=text, plain=True), *self._follows("", text=after)]

    def _follows(self, before: str, space: str = "", *, text: str, plain: bool = False) -> list[int]:
        """The tokens of `space + text` after another text. Some tokenizers, such as that of Llama 2, put a space before
        a text that is encoded by itself."""
        # A token that is partly of both texts cannot be cut; a new line joins nothing.
        for other in (before or "\n", "\n") if self._adds_space else ():
            start, whole = self._encode(other, plain=plain), self._encode(other + space + text, plain=plain)
            if whole[: len(start)] == start:
                return whole[len(start) :]
        return self._encode(space + text, plain=plain)

    @cached_property
    def _adds_space(self) -> bool:
        """True if the tokenizer changes the beginning of each text that it encodes."""
        normalizer, splitter = self.backend.normalizer, self.backend.pre_tokenizer
        text = "a" if normalizer is None else normalizer.normalize_str("a")
        return text != "a" or (
            splitter is not None and "".join(said for said, _ in splitter.pre_tokenize_str(text)) != "a"
        )

    def _frame(self, role: str) -> "_Frame":
        """What the chat template puts around an environment's text, as `role` or, if it has no such role, as the user.
        Templates of Llama 3 write a tool's text as JSON."""
        # Templates of models that know no tools raise for their role.
        for speaker in dict.fromkeys((role, "user")):
            try:
                said = self.render(*_MARKS, roles=("user", "assistant", speaker))
            except TokenizerError:
                continue
            for as_json, mark in enumerate((_MARKS[2], _json_text(_MARKS[2]))):
                parts = said.rpartition(_MARKS[1])[2].split(mark)
                if len(parts) == 2:
                    return _Frame(speaker, parts[0], parts[1], bool(as_json))
        needed = f"one that has a {role!r} or user"
        raise TokenizerError(f"chat template: given a conversation of two turns, needed {needed}")

    def render(self, *texts: str, roles: Sequence[str] = ("user",)) -> str:
        """A conversation, by default one user message, formatted by the chat template up to where the answer begins.
        Raises TokenizerError if the template fails."""
        assert self.template is not None
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
        try:
            given = {**self.variables, "messages": messages, **_BESIDE, **self.special}
            return _compiled(self.template).render(given)
        except Exception as error:  # a template is a program, which may raise anything
            # The message of a template's own error says enough.
            kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            needed = f"a template that renders messages of {', '.join(roles)}"
            why = f"{kind}{str(error).rstrip('.')}"
            raise TokenizerError(f"chat template: given one that fails: {why}, needed {needed}") from error

    def require_variables(self, words: Iterable[str]) -> None:
        """Raise TokenizerError for `template_variables` that the chat template does not read: they have no effect."""
        parsed = _environment().parse(self.template or "")
        known = meta.find_undeclared_variables(parsed) - {"messages", *_BESIDE, *self.special, *_environment().globals}
        if unknown := sorted(template_variables(words).keys() - known):
            needed = f"variables that the model's chat template reads: {', '.join(sorted(known)) or 'there are none'}"
            raise TokenizerError(f"{VARIABLES}: given {', '.join(unknown)}, needed {needed}")

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens, without special ones."""
        return self.backend.decode(list(tokens), skip_special_tokens=True)

    def for_scores(self) -> "Tokenizer":
        """The tokenizer for a model that scores texts. Its padding token is no stop: if the own one is, a special token
        that texts do not have takes its place, or none.

        `transformers` reads the score at the last token of a row that is not padding, and takes batches only with it.
        """
        if self.pad not in self.stops:
            return self
        used = {*self.special.values(), *map(self.backend.id_to_token, (*self.stops, *self.backend.encode("").ids))}
        free = [
            token.content
            for _, token in sorted(self.backend.get_added_tokens_decoder().items())
            if token.special and token.content not in used and token.content not in (self.template or "")
        ]
        # Best one that is meant for padding, such as that of images.
        word = min(free, key=lambda word: "pad" not in word.lower(), default=None)
        pad = None if word is None else self.backend.token_to_id(word)
        special = {key: text for key, text in {**self.special, "pad_token": word}.items() if text is not None}
        return Tokenizer(self.backend, self.stops, pad, self.template, special, self.generation, self.variables)

    def save(self, folder: str | Path) -> None:
        """Write the files from which `load_tokenizer` makes an equal tokenizer."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.backend.save(str(folder / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self.backend.id_to_token(self.eos),
            # Without the null, transformers has a pad token of its own for some families.
            "pad_token": None if self.pad is None else self.backend.id_to_token(self.pad),
            **self.special,
        }
        if self.template is not None:
            config["chat_template"] = self.template
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
        # Other tools, too, stop where this one does, whatever config.json says.
        generation = {**self.generation, "eos_token_id": self.stops if len(self.stops) > 1 else self.eos}
        (folder / GENERATION).write_text(json.dumps(generation, indent=2) + "\n")

    def _encode(self, text: str, *, begins: bool = False, plain: bool = False) -> list[int]:
        """The tokens of a text. `begins` adds those that mark a beginning; `plain` encodes special tokens as text."""
        self.backend.encode_special_tokens = plain
        try:
            encoding = self.backend.encode(text, add_special_tokens=begins)
        except TypeError as error:  # half of a surrogate pair, as JSON may have it
            raise TokenizerError(f"given {text!r}, needed a text of whole characters") from error
        tokens = encoding.ids
        # Some tokenizers mark the end, too: nothing would follow it.
        while begins and len(tokens) > 1 and encoding.special_tokens_mask[len(tokens) - 1] and tokens[-1] in self.stops:
            tokens.pop()
        if self._unknown is not None and self._unknown in tokens:
            # The text may contain that token's own text, which `plain` may encode as letters.
            says_it = self.backend.encode(UNKNOWN, add_special_tokens=False).ids == [self._unknown]
            if tokens.count(self._unknown) > says_it * text.count(UNKNOWN):
                # A character may be unknown only beside others: then name the whole text.
                unsaid = next((letter for letter in text if letter in self.lacks([letter])), text)
                needed = f"a text without {unsaid!r}: the tokenizer has no token for it"
                raise TokenizerError(f"given {text!r}, needed {needed}")
        return tokens


class _Frame(NamedTuple):
    """An environment's turn by a chat template: the role that it knows, the text from the end of the model's turn to
    the environment's text, the text after that, and whether the environment's text is written as JSON."""

    role: str
    before: str
    after: str
    as_json: bool


def _json_text(text: str) -> str:
    """A text within the quotes of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _byte_letters() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(value) if value in printable else chr(next(others)) for value in range(256)]


def byte_tokenizer(alphabet: str | None = None) -> Tokenizer:
    """One token per byte: for every byte, in the order of their values, or only for the bytes of `alphabet`.

    The end and padding tokens follow. Encoding a text with other bytes raises TokenizerError.
    """
    values, letters = range(256) if alphabet is None else sorted(set(alphabet.encode())), _byte_letters()
    vocab = {letters[value]: token for token, value in enumerate(values)}
    special = [EOS, PAD] if alphabet is None else [EOS, PAD, UNKNOWN]
    vocab |= {text: len(vocab) + i for i, text in enumerate(special)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=None if alphabet is None else UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return Tokenizer(backend, (vocab[EOS],), vocab[PAD], generation={"pad_token_id": vocab[PAD]})


# A text such as "False" would count as true in a template.
_PYTHONS = {"True": "true", "False": "false", "None": "null"}


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def template_variables(words: Iterable[str]) -> dict[str, Any]:
    """Variables of a chat template from words NAME=VALUE: the value as JSON, or the text itself if it is none. Python's
    True, False and None are those of JSON."""
    found: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not (equals and name.isidentifier()) or name in found:
            needed = "NAME=VALUE, such as enable_thinking=false, each name once"
            raise TokenizerError(f"{VARIABLES}: given {word!r}, needed {needed}")
        try:
            found[name] = json.loads(_PYTHONS.get(text, text), parse_constant=_no_constant)
        except (ValueError, RecursionError):
            found[name] = text
    return found


def load_tokenizer(folder: str | Path, variables: Iterable[str] = ()) -> Tokenizer:
    """The tokenizer of a model directory. Raises TokenizerError if it has none, or one that cannot be read."""
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.exists():
        found = ", ".join(name for name in FILES_OF_OTHERS if (folder / name).exists()) or "no file of a tokenizer"
        raise TokenizerError(f"{folder}: given {found}, needed tokenizer.json, as save_pretrained writes it")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more exact
        needed = "one as save_pretrained writes it: is the download whole?"
        raise TokenizerError(f"{path}: given a file that cannot be read: {error}, needed {needed}") from error
    # Truncation and padding that the file was saved with are settings of a caller, not the model's.
    backend.no_truncation()
    backend.no_padding()
    files = "tokenizer_config.json", "special_tokens_map.json", GENERATION, "config.json"
    config, mapped, generation, model = (_json(folder / name) for name in files)
    config = {**mapped, **config}
    special: dict[str, str] = {}
    for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
        # A token is a text, or an object with the text as its content.
        token = said.get("content") if isinstance(said := config.get(key), dict) else said
        if said:
            if not isinstance(token, str):
                raise TokenizerError(f"{folder}: tokenizer_config.json: given {key} {said!r}, needed a text")
            special[key] = token
    template, most = _template(folder, config), model.get("vocab_size")
    _require_added(folder, backend, config, template or "")
    if isinstance(most, int):
        backend = _of_model(backend, most, {*special.values()}, template or "")
    try:
        others, least = (token_ids(found.get("eos_token_id")) for found in (generation, model))
    except ValueError as error:
        raise TokenizerError(f"{folder}: {error}") from error
    named = [backend.token_to_id(special[key]) if key in special else None for key in ("eos_token", "pad_token")]
    stops = [] if named[0] is None else [named[0]]
    # As in transformers: those of config.json if generation_config.json has none.
    stops += [token for token in others or least if token not in stops]
    if not stops:
        raise TokenizerError(f"{folder}: given no eos_token, needed one in tokenizer_config.json")
    # Check the model's own stop tokens, too: with another model's tokenizer a response would never end.
    unknown = [token for token in (*stops, *least) if backend.id_to_token(token) is None]
    if unknown:
        known = f"one of the {backend.get_vocab_size()} of tokenizer.json: a tokenizer of another model?"
        raise TokenizerError(f"{folder}: given eos_token_id {unknown[0]}, needed {known}")
    pad = stops[0] if named[1] is None else named[1]
    # Without the file, transformers takes these from config.json. Older versions prefer that one if the file says that
    # it was made from it.
    settings = generation or {key: model[key] for key in ("bos_token_id", "pad_token_id") if key in model}
    settings = {key: value for key, value in settings.items() if key != "_from_model_config"}
    tokenizer = Tokenizer(backend, stops, pad, template, special, settings, template_variables(variables))
    if isinstance(most, int) and tokenizer.vocab_size > most:
        given, needed = f"token {tokenizer.vocab_size - 1}", f"tokens below {most}, the vocab_size of config.json"
        raise TokenizerError(f"{path}: given {given}, needed {needed}: a tokenizer of another model?")
    # With one that is a word in this vocabulary, every response would end at that word.
    own, added = {*special.values()}, backend.get_added_tokens_decoder()
    for token in stops:
        text = backend.decode([token], skip_special_tokens=False)
        if token not in added and backend.id_to_token(token) not in own and _is_plain(text):
            given, needed = f"eos_token_id {token}, which is the text {text!r}", "a special token"
            where = folder / (GENERATION if others else "config.json")
            raise TokenizerError(f"{where}: given {given}, needed {needed}: a tokenizer of another model?")
    if tokenizer.template is not None:
        try:
            said = tokenizer.render(_MARKS[0])
        except TokenizerError as error:
            raise TokenizerError(f"{folder}: {error}") from error
        if _MARKS[0] not in said:
            needed = "the question in it"
            raise TokenizerError(f"{folder}: chat template: given {said!r} for every question, needed {needed}")
        # The base of a model that chats may name another end than its template, which a model of the template learns.
        tokenizer.stops = tuple(dict.fromkeys((*stops, tokenizer.end)))
    return tokenizer


def _require_added(folder: Path, backend: tokenizers.Tokenizer, config: dict[str, Any], template: str) -> None:
    """Raise TokenizerError if the chat template has a special token that only a file beside tokenizer.json names: it
    would be encoded as letters. `transformers` adds such tokens."""
    by_number, more = config.get("added_tokens_decoder"), config.get("additional_special_tokens")
    named = [*(by_number.values() if isinstance(by_number, dict) else ()), *(more if isinstance(more, list) else ())]
    texts = [token.get("content") if isinstance(token, dict) else token for token in named]
    for text in [*texts, *_json(folder / "added_tokens.json")]:
        if isinstance(text, str) and text and text in template and backend.token_to_id(text) is None:
            needed = "one that has it, as save_pretrained of transformers writes it"
            raise TokenizerError(f"{folder}: given a tokenizer.json without the token {text!r}, needed {needed}")


def _is_plain(text: str) -> bool:
    """True for the text of a token that responses say. False for one with the form of a special token, such as <|end|>,
    [SEP] or |END|, and for spaces and control characters: some models end a text with a new line."""
    bracketed = len(text) > 2 and f"{text[0]}{text[-1]}" in ("<>", "[]", "||")
    return not bracketed and any(letter.isalnum() or letter in punctuation for letter in text)


def _of_model(backend: tokenizers.Tokenizer, most: int, named: set[str], template: str) -> tokenizers.Tokenizer:
    """The tokenizer without special tokens that are beyond the model's vocabulary, so that their texts are plain text.
    An example is the image token in the tokenizer that Gemma 3's language models share with the others. If the model
    needs one of these tokens, or one is not special, the tokenizer stays as it is."""
    beyond = {word for word, token in backend.get_vocab(with_added_tokens=True).items() if token >= most}
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    if not beyond or not beyond <= special - named or any(word in template for word in beyond):
        return backend
    if max(backend.encode("").ids, default=0) >= most:
        return backend
    whole = json.loads(backend.to_str())
    whole["added_tokens"] = [token for token in whole["added_tokens"] if token["content"] not in beyond]
    return tokenizers.Tokenizer.from_str(json.dumps(whole))


def _template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise TokenizerError(f"{path}: given a file that cannot be read: {error}, needed text in UTF-8") from error
    template, where = config.get("chat_template"), folder / "tokenizer_config.json"
    if isinstance(template, list) and all(isinstance(item, dict) for item in template):
        named = {str(item.get("name")): item.get("template") or item for item in template}
        # Without a default, nothing says which of them formats a prompt; transformers raises, too.
        if "default" not in named:
            given = f"chat_template with the names {', '.join(named)}" if named else "an empty list as chat_template"
            raise TokenizerError(f"{where}: given {given}, needed one named default, or a text")
        template = named["default"]
    if template is not None and not isinstance(template, str):
        needed = "a text, or a list of objects with name and template"
        raise TokenizerError(f"{where}: given chat_template {template!r:.200}, needed {needed}")
    return template


def _json(path: Path) -> dict[str, Any]:
    return read_json(path, TokenizerError) if path.exists() else {}


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training. Rendering a prompt ignores it."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    return _environment().from_string(template)


@lru_cache(maxsize=1)
def _environment() -> Environment:
    def refuse(message: str) -> None:
        raise TemplateError(message)

    extensions = ["jinja2.ext.loopcontrols", _Generation]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    # As chat templates expect it: without HTML escapes.
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = refuse
    # Templates of Mistral and Llama write today's date. A run's prompts must not depend on the day: use the date that
    # Llama 3's templates write if this function is missing.
    environment.globals["strftime_now"] = date(2024, 7, 26).strftime
    return environment

"""Rows of data from a file, a directory or the Hugging Face Hub, and the prompts, answers and responses in them.

`--data` is the path of a JSONL file, which may be compressed by gzip, of a parquet file, of a directory of such files
or one that `save_to_disk` of `datasets` has written, or OWNER/NAME[:CONFIG][@REVISION] on the Hub. Parquet,
`save_to_disk` and the Hub need the extra `data`. A fault of a row is a `DataError` that begins with its place,
"FILE:LINE" or "FILE, row N".

A file of a directory belongs to the split in its name: `test.jsonl`, `data/train-00000-of-00004.parquet`. Files
without one belong to "train" where no other file does. The split to read is `--data-split`, or else "train", or the
only one.
"""

import gzip
import json
import re
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from penstock.graph import GraphError, load
from penstock.graph.context import Context
from penstock.graph.hub import unreachable
from penstock.host import install_command
from penstock.nodes.tokenizer import Message, conversation

# OWNER/NAME on the Hub, with a configuration and a revision.
_HUB = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?::(?P<config>[\w.-]+))?(?:@(?P<revision>[\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SUFFIXES = (".jsonl", ".json", ".parquet", ".ndjson", ".jsonl.gz", ".json.gz", ".ndjson.gz")
_FORMATS = "an object per line (.jsonl), an array of objects (.json), both perhaps .gz, or .parquet; no other is read"
# Other formats of rows, and archives, which are not read; any of them, or of ours, may be compressed.
_OTHERS = "csv|tsv|arrow|feather|orc|avro|xlsx?|pkl|sqlite|db|msgpack|tfrecord"
_PACKED = r"\.(?:gz|gzip|zst|bz2|xz|lz4)"
_UNREAD = re.compile(
    rf"\.(?:(?P<rows>(?:{_OTHERS})|(?:{_OTHERS}|jsonl?|ndjson|parquet){_PACKED})|(?:zip|7z|tgz|tar)(?:{_PACKED})?)$",
    re.IGNORECASE,
)
_READ = re.compile(rf"(?:{'|'.join(map(re.escape, _SUFFIXES))})$", re.IGNORECASE)
_GZIP = b"\x1f\x8b"
_SPLITS = ("train", "test", "testing", "validation", "valid", "val", "dev", "eval", "evaluation", "heldout", "holdout")
# The suffix of a shard's name; older ones end with a part of a digest.
_SHARD = re.compile(r"-(?P<number>[0-9]{5})-of-(?P<total>[0-9]{5})(?:-[0-9a-f]{16})?$")
# Files beside the rows in clones of data sets.
_ABOUT = ("dataset_info.json", "dataset_infos.json", "config.json")
# GSM8K writes the final number after this.
FINAL = "####"
# The value of --answer-field for data without reference answers.
NO_ANSWER = "none"

# The first rows for which a function of rows is called twice.
CALLED_TWICE = 256
# What `repr` says of an object that has no own: its address.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")

T = TypeVar("T")


class DataError(ValueError):
    """The data cannot be used as it is: what was given, what is needed, file and row."""


class DataRow(NamedTuple):
    """A row's fields by name, and its place for messages."""

    place: str
    fields: Mapping[str, Any]

    def lack(self, given: str, needed: str) -> DataError:
        return DataError(f"{self.place}: given {given}, needed {needed}")

    def value(self, field: str, flag: str = "") -> Any:
        """The value of a field. "a.b" is the field b of the object a, unless a field has that name. Raises DataError if
        there is none, or if it is null; `flag` is the one that names another field, for the message."""
        value: Any = self.fields
        for name in [field] if field in self.fields else field.split("."):
            if not isinstance(value, Mapping) or name not in value:
                there = f"the fields {sorted(map(str, value))}" if isinstance(value, Mapping) else f"{value!r:.80}"
                whose = "" if value is self.fields else f" before {name!r} of {field!r}"
                hint = f" ({flag} names another)" if flag else ""
                raise self.lack(f"{there}{whose}", f"{name!r}{hint}")
            value = value[name]
        if value is None:
            raise self.lack(f"null as {field!r}", "a value")
        return value

    def text(self, field: str, value: Any) -> str:
        """The value, if it is a text that is not blank; else raises DataError."""
        if not isinstance(value, str) or not value.strip():
            raise self.lack(f"{value!r:.200} as {field!r}", "a text")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"{self.place}: given {value[error.start]!r} in {field!r}, which is no character") from None
        return value

    def messages(self, field: str, value: Any) -> list[Message]:
        """The value, if it is chat messages, a list of objects with the texts `role` and `content`; else raises
        DataError."""
        if not isinstance(value, list) or not value:
            raise self.lack(f"{value!r:.200} as {field!r}", "a text, or a list of messages with role and content")
        for message in value:
            # A table has null for keys that only other rows have.
            keys = {key for key, part in message.items() if part is not None} if isinstance(message, dict) else set()
            if keys != {"role", "content"}:
                more = f", with the keys {', '.join(sorted(map(str, keys)))}," if keys else ""
                given = f"{message!r:.200}{more} among the messages {field!r}"
                raise self.lack(given, "an object with role and content alone")
            self.text(f"{field}.role", message["role"])
            if message["content"] != "":
                self.text(f"{field}.content", message["content"])
        return [{"role": message["role"], "content": message["content"]} for message in value]


class FileProblem(NamedTuple):
    """A prompt of a file: `solution` is the whole answer of its row, `answer` the reference answer: the last line, if
    that begins with `FINAL`, or all of it."""

    prompt: str
    answer: str
    solution: str
    place: str


def read_problem(row: DataRow, context: Context) -> FileProblem:
    """The prompt and the reference answer of a row, "" with `--answer-field none`."""
    prompt = _prompt(row, context)
    if prompt[-1]["role"] == "assistant":
        # Demonstrations of `sft` end like this, and some of them are read as problems on which to measure accuracy.
        needed = "" if context.split == "train" else ", other --eval-data, or --eval-groups 0"
        raise row.lack("messages that end with an assistant's", f"a message to answer at the end{needed}")
    solution = "" if context.answer_field == NO_ANSWER else _answer(row, context)
    last = solution.strip().rpartition("\n")[2].strip()
    answer = last.removeprefix(FINAL) if last.startswith(FINAL) else solution
    return FileProblem(conversation(prompt), answer.strip(), solution, row.place)


def read_demonstration(row: DataRow, context: Context) -> tuple[str, str]:
    """A prompt and the response to it: the answer, or the last of chat messages if that is an assistant's."""
    *prompt, last = _prompt(row, context)
    if last["role"] == "assistant":
        if not prompt:
            raise row.lack("a message of the assistant alone", "one before it")
        return conversation(prompt), row.text("content", last["content"])
    # A response in a column of its own may be chat messages, too: one message, the assistant's.
    field = context.answer_field or "answer"
    said = row.value(field, "--answer-field")
    if isinstance(said, list) and said and all(isinstance(part, dict) and "role" in part for part in said):
        (*before, last_said) = row.messages(field, said)
        if before or last_said["role"] != "assistant":
            raise row.lack(f"{len(said)} messages as {field!r}", "one, an assistant's")
        return conversation([*prompt, last]), row.text(field, last_said["content"])
    return conversation([*prompt, last]), _answer(row, context)


def read_pair(row: DataRow, context: Context) -> tuple[str, str, str]:
    """A prompt, the preferred response and the other one. Responses are texts, or the last of chat messages; then the
    messages before are the prompt if the row has no field for it."""
    field, messages = context.prompt_field or "prompt", {}
    for name in ("chosen", "rejected"):
        value = row.value(name)
        messages[name] = (
            [{"role": "assistant", "content": row.text(name, value)}]
            if isinstance(value, str)
            else row.messages(name, value)
        )
        if messages[name][-1]["role"] != "assistant":
            raise row.lack(f"messages {name!r} that end with a {messages[name][-1]['role']}'s", "an assistant's")
    (*before, chosen), (*other, rejected) = messages["chosen"], messages["rejected"]
    implied = field not in row.fields and before
    prompt = _with_system(row, before, context) if implied else _prompt(row, context, "prompt")
    for name, earlier in (("chosen", before), ("rejected", other)):
        if earlier and _with_system(row, earlier, context) != prompt:
            raise row.lack(f"messages {name!r} that follow another prompt", "the same prompt for both responses")
    if chosen == rejected:
        raise row.lack("the same text as 'chosen' and 'rejected'", "two that differ")
    return conversation(prompt), chosen["content"], rejected["content"]


def _prompt(row: DataRow, context: Context, default: str = "question") -> list[Message]:
    field = context.prompt_field or ("prompt" if context.row else default)
    value = row.value(field, "--prompt-field")
    # An empty text is reported as a text.
    as_text = isinstance(value, str) or not isinstance(value, list)
    messages = [{"role": "user", "content": row.text(field, value)}] if as_text else row.messages(field, value)
    return _with_system(row, messages, context)


def _with_system(row: DataRow, messages: list[Message], context: Context) -> list[Message]:
    if not context.system:
        return messages
    if messages[0]["role"] == "system":
        raise row.lack("a system message of its own and --system", "one of them")
    return [{"role": "system", "content": context.system}, *messages]


def _answer(row: DataRow, context: Context) -> str:
    """A text; a number, an object or a list is written as JSON."""
    field = context.answer_field or "answer"
    value = row.value(field, "--answer-field")
    if isinstance(value, str):
        return row.text(field, value)
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:  # NaN, which tables have for missing values
        raise row.lack(f"{value!r:.80} as {field!r}", "a finite number, or a text") from None
    except TypeError:
        raise row.lack(f"a {type(value).__name__} as {field!r}", "a text or what JSON can hold") from None


class Table(NamedTuple):
    """Rows, and the `--data` that names exactly these: for a data set of the Hub, with its revision."""

    rows: list[DataRow]
    data: str

    def read(self, make: Callable[[DataRow, Context], T], context: Context) -> list[T]:
        """`make(row, context)` of each row, after the function `context.row` if there is one; rows for which that
        returns None are left out."""
        if not self.rows:
            raise DataError(f"{self.data}: given an empty file, needed a row")
        rows = self.rows if not context.row else list(_mapped(self.rows, context.row))
        if not rows:
            raise DataError(f"{self.data}: given no row that {context.row} keeps, needed one")
        return [make(row, context) for row in rows]


def _mapped(rows: Iterable[DataRow], path: str) -> Iterator[DataRow]:
    if not path.endswith(".py") and ":" not in path:
        raise DataError(f"--row: given {path!r}, needed MODULE:NAME or FILE.py:NAME")
    try:
        function = load(path)
    except GraphError as error:
        raise DataError(f"--row: given {error.faults[0].given}, needed {error.faults[0].needed}") from None
    for number, row in enumerate(rows):
        try:
            again = function(deepcopy(row.fields)) if number < CALLED_TWICE else None
            fields = function(dict(row.fields))
        except (Exception, SystemExit) as error:  # report any exception of a user's function with the row
            raise DataError(f"{row.place}: {path} raised {type(error).__name__}: {error}") from error
        # Each rank reads the rows, and a resume does: held-out ones would be trained on.
        if number < CALLED_TWICE and len({_ADDRESS.sub("", repr(found)) for found in (again, fields)}) > 1:
            raise row.lack(f"{again!r:.80} from {path}, then {fields!r:.80}", "the same for the same row each time")
        if fields is not None and not isinstance(fields, dict):
            raise row.lack(f"a {type(fields).__name__} from {path}", "a dict, or None to leave the row out")
        if fields is not None:
            yield row._replace(fields=fields)


def called(context: Context) -> str:
    """What messages call `context.data`."""
    return "data of the evaluation" if context.split == "whole" else "data"


def open_table(context: Context) -> Table:
    """All rows of what `context.data` and `context.data_split` name. Raises DataError."""
    data, wanted, path = context.data, context.data_split, Path(context.data)
    flag = "--eval-split" if context.split == "whole" else "--data-split"
    if path.is_file():
        if wanted:
            raise DataError(f"{flag}: given {wanted!r} of the file {data}, needed a directory or a data set")
        return Table(list(_file_rows(path)), data)
    if path.is_dir() and any((path / name).exists() for name in ("dataset_dict.json", "state.json")):
        library = _library("datasets", data)
        try:
            saved = library.load_from_disk(data)
            splits = dict(saved) if hasattr(saved, "keys") else {"train": saved}
            name, rows = _chosen(splits, wanted, data, flag)
            return Table(_numbered(_undecoded(rows), f"{data} ({name})"), data)
        except DataError:
            raise
        except Exception as error:  # the library passes on any exception of its readers
            needed = "what `save_to_disk` of datasets has written, all of it"
            raise DataError(f"{data}: cannot be read: {type(error).__name__}: {error}; needed {needed}") from error
    if path.is_dir():
        files: dict[str, list[Path]] = {}
        unread: dict[str, Path] = {}
        found = (file for file in path.rglob("*") if _READ.search(file.name) or _UNREAD.search(file.name))
        for file in sorted(file.relative_to(path) for file in found if file.is_file()):
            if any(part.startswith(".") for part in file.parts) or file.name.lower() in _ABOUT:
                continue
            if _READ.search(file.name):
                files.setdefault(_split_of(file), []).append(path / file)
            elif match := _UNREAD.search(file.name):
                # An archive without the name of a split may hold anything, such as images.
                split = _split_of(file) or ("train" if match["rows"] else "")
                unread.setdefault(split, file)
        # Rows of a split that is in such a file alone would be left out, and those of another one read in their place.
        lost = wanted or "train"
        if files and lost in unread and lost not in files and not (lost == "train" and "" in files):
            raise DataError(f"{data}: given {unread[lost]}, needed {_FORMATS}: convert it, or name the file to read")
        if not files:
            raise DataError(f"{data}: given a directory without one of {', '.join(_SUFFIXES)}, needed a file of rows")
        unnamed = files.pop("", [])
        if unnamed and "train" not in files:
            files["train"], unnamed = unnamed, []
        name, chosen = _chosen(files, wanted, data, flag)
        if unnamed and name == "train":
            given = f"given {chosen[0].name} beside {unnamed[0].name}, whose name is that of no split"
            raise DataError(f"{data}: {given}; needed one file, or the names of splits: {', '.join(_SPLITS)}")
        _require_each_once(chosen, data)
        return Table([row for file in chosen for row in _file_rows(file)], data)
    return _hub_table(data, wanted, flag, called(context))


def is_on_hub(data: str) -> bool:
    """True if it can be the name of a data set of the Hub."""
    return bool(_HUB.fullmatch(data)) and not _READ.search(data)


def _hub_table(data: str, wanted: str, flag: str, what: str) -> Table:
    match = _HUB.fullmatch(data)
    assert match is not None
    name, config, revision = match["name"], match["config"], match["revision"]
    library = _library("datasets", data)
    library.disable_progress_bars()
    silent = unreachable("dataset", name, revision)
    offline = library.config.HF_HUB_OFFLINE
    try:
        library.config.HF_HUB_OFFLINE = offline or bool(silent)  # then it uses its cache, and sends no request
        builder = library.load_dataset_builder(name, config, revision=revision)
        builder.download_and_prepare()
    except Exception as error:  # the library passes on any exception of its clients
        needed = "needed OWNER/NAME[:CONFIG][@REVISION] of the Hugging Face Hub, or a file that is there"
        raise DataError(f"{what}: given {data!r}, which cannot be read: {silent or error}; {needed}") from error
    finally:
        library.config.HF_HUB_OFFLINE = offline
    found = str(builder.hash)
    # If the Hub cannot be reached, the library uses its cache, of any revision.
    if revision and _COMMIT.fullmatch(revision) and found != revision:
        raise DataError(f"{what}: given {data!r} and a cache of revision {found}, needed that revision, or the Hub")
    split, _ = _chosen(dict(builder.info.splits), wanted, data, flag)
    pinned = f"{name}:{config}@{found}" if config else f"{name}@{found}"
    return Table(_numbered(_undecoded(builder.as_dataset(split=split)), f"{pinned} ({split})"), pinned)


def _undecoded(dataset: Any) -> Iterator[Mapping[str, Any]]:
    """The rows of a data set as in its table: images and sounds, which nothing here reads, stay bytes."""
    if "Json(" in repr(dataset.features):  # a table has these as texts
        yield from dataset
        return
    # In batches: one by one takes much longer.
    for table in dataset.with_format("arrow").iter(batch_size=1000):
        yield from _rows(table)


def _rows(table: Any) -> list[dict[str, Any]]:
    """The rows of a table, with floats of 32 and 16 bits as `_seen` has them."""
    columns = [column.to_pylist() for column in table.columns]
    for place, field in enumerate(table.schema):
        if "float" in str(field.type):  # "double" has 64 bits
            columns[place] = [_seen(value, field.type) for value in columns[place]]
    return [dict(zip(table.column_names, row, strict=True)) for row in zip(*columns, strict=True)]


def _seen(value: Any, type_: Any) -> Any:
    """A value of a table as people see it: a fraction of 32 or 16 bits is the shortest decimal that stands for it, such
    as 0.1, not 0.10000000149011612."""
    kinds = import_module("pyarrow").types
    if value is None:
        return None
    if kinds.is_float32(type_) or kinds.is_float16(type_):
        narrow = np.float32 if kinds.is_float32(type_) else np.float16
        # The shortest decimal of a large whole number has zeros in place of its last digits.
        return value if value.is_integer() else float(str(narrow(value)))
    if kinds.is_struct(type_):
        return {field.name: _seen(value[field.name], field.type) for field in type_}
    if kinds.is_map(type_):
        return [(_seen(key, type_.key_type), _seen(item, type_.item_type)) for key, item in value]
    if kinds.is_dictionary(type_):
        return _seen(value, type_.value_type)
    return [_seen(item, type_.value_type) for item in value] if isinstance(value, list) else value


def _numbered(rows: Iterable[Mapping[str, Any]], place: str) -> list[DataRow]:
    return [DataRow(f"{place}, row {number}", fields) for number, fields in enumerate(rows, 1)]


def _bare(file: Path) -> Path:
    """Return a file's path without the suffixes of its format and compression."""
    return file.with_name(_UNREAD.sub("", _READ.sub("", file.name)))


def _require_each_once(files: Sequence[Path], data: str) -> None:
    """Raise DataError if files have the same rows by their names, or if those that are named as shards are not all
    shards of one table."""
    known: dict[Path, Path] = {}
    tables: dict[tuple[Path, int], set[int]] = {}
    for file in files:
        path = _bare(file)
        if shard := _SHARD.search(path.name):
            table = path.with_name(path.name[: shard.start()]), int(shard["total"])
            tables.setdefault(table, set()).add(int(shard["number"]))
            path = path.with_name(path.name[: shard.end("total")])  # without the digest of the whole
        if (same := known.setdefault(path, file)) != file:
            raise DataError(f"{data}: given {same.name} and {file.name}, needed one of them: the same rows twice?")
    if len(tables) > 1:
        first, second = (f"{path.relative_to(data)}-*-of-{total:05}" for path, total in list(tables)[:2])
        needed = "needed the folder of one of them: each is a whole table, such as a configuration of the data set"
        raise DataError(f"{data}: given {first} and {second}, {needed}")
    for (path, total), numbers in tables.items():
        if missing := set(range(total)) - numbers:
            given = f"given {len(numbers)} of the {total} files of {path.relative_to(data)}"
            raise DataError(f"{data}: {given}, needed all: there is no {path.name}-{min(missing):05}-of-{total:05}")


def _split_of(file: Path) -> str:
    """The name of a file's split; "" if its name is that of no split."""
    file = _bare(file)
    stem = _SHARD.sub("", file.name)
    if stem != file.name:
        return stem
    words = re.split(r"[^a-zA-Z]+", str(file).lower())
    return next((word for word in reversed(words) if word in _SPLITS), "")


def _chosen(splits: Mapping[str, T], wanted: str, data: str, flag: str) -> tuple[str, T]:
    name = wanted or ("train" if "train" in splits or len(splits) != 1 else next(iter(splits)))
    if name not in splits:
        given = repr(wanted) if wanted else "none"
        raise DataError(f"{flag}: given {given} of {data}, needed one of {', '.join(sorted(splits))}")
    return name, splits[name]


def _library(name: str, data: str) -> Any:
    if find_spec(name.partition(".")[0]) is None:
        package = name.partition(".")[0]
        raise DataError(f"{data}: given no package {package!r}, which reads it; needed: {install_command('data')}")
    return import_module(name)


def _file_rows(path: Path) -> Iterator[DataRow]:
    """The rows of a parquet file, or of a file with a JSON object per line; a `.json` may be an array of objects."""
    name = path.name.lower()
    if _UNREAD.search(name) and not _READ.search(name):
        raise DataError(f"{path}: given a file of another format, needed {_FORMATS}")
    try:
        if name.endswith(".parquet"):
            yield from _numbered(_rows(_library("pyarrow.parquet", str(path)).read_table(path)), str(path))
            return
        content = path.read_bytes()
        content = gzip.decompress(content) if content.startswith(_GZIP) else content
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, EOFError, zlib.error) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: cannot be read: {error}; needed a whole file of its format") from error
    if name.endswith((".json", ".json.gz")) and content.removeprefix(BOM_UTF8).lstrip()[:1] == b"[":
        yield from _array_rows(path, content)
        return
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        row = DataRow(f"{path}:{number}", {})
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise row.lack(f"a line that is not JSON: {error}", _FORMATS) from error
        if not isinstance(fields, dict):
            raise row.lack(f"a JSON {type(fields).__name__}", "an object")
        yield row._replace(fields=fields)


def _array_rows(path: Path, content: bytes) -> Iterator[DataRow]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: given something that is not JSON: {error}; needed {_FORMATS}") from error
    for row in _numbered(found, str(path)):
        if not isinstance(row.fields, dict):
            raise row.lack(f"a JSON {type(row.fields).__name__}", "an object")
        yield row

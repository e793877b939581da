"""Reading and writing Hugging Face model directories (`config.json`, safetensors) and peft's directories of adapters.

A directory of adapters names the directory of its base, from which everything else is read.
"""

import fcntl
import hashlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, TextIO, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from penstock.graph.hub import HubError, at_revision, model_folder
from penstock.host import private_folder
from penstock.nodes.model.config import ModelConfig, ModelError, read_json
from penstock.nodes.model.decoder import CausalLM, Decoder, Scorer
from penstock.nodes.model.lora import A, B, Lora, initial, is_adapter, merged

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
ADAPTER_CONFIG, ADAPTERS = "adapter_config.json", "adapter_model.safetensors"
# The beginning of the pointer file that a clone without Git LFS has in place of a large file.
LFS = b"version https://git-lfs"
# The prefix of peft's names.
PEFT = "base_model.model."
# The most bytes of one file of weights.
SHARD_BYTES = 4 << 30
# A file that was written more recently may change again without a new time of change.
SETTLED_S = 10.0
# The head of a `Scorer`, that of a language model, and the embedding, which may be tied to it.
HEAD, LM_HEAD, EMBEDDING = "score.weight", "lm_head.weight", "model.embed_tokens.weight"
# The number formats that are read from a file.
_STORED = ("F64", "F32", "BF16", "F16")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def torch_dtype(given: str | torch.dtype) -> torch.dtype:
    """The dtype that a flag or a `config.json` names; a dtype is returned as it is. Raises ModelError for one that no
    model computes in."""
    if given not in (*_DTYPES, *_DTYPES.values()):
        raise ModelError(f"given dtype {given!r}, needed one of: {', '.join(_DTYPES)}, or the torch.dtype")
    return _DTYPES[given] if isinstance(given, str) else given


def read_config(folder: str | Path) -> ModelConfig:
    """The configuration of a model directory, or of the base of adapters. Raises ModelError, with the file's name, if
    it cannot be used."""
    base = read_adapters(folder)[0]
    path = base / CONFIG
    if not path.exists():
        given = f"{path}: given no such file" if base.is_dir() else f"{base}: given no such directory"
        raise ModelError(f"{given}, needed a model's directory in Hugging Face's format, or a name of its Hub")
    data = read_json(path)
    if "model_type" not in data and (base / "checkpoints").is_dir():
        saved = max((base / "checkpoints").glob("*/policy"), default=base / "checkpoints" / "NUMBER" / "policy")
        raise ModelError(f"{base}: given the folder of a run, needed a model, such as {saved}")
    try:
        return ModelConfig.from_json(data)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error


def read_adapters(folder: str | Path) -> tuple[Path, Lora | None]:
    """(the directory of the base, the adapters) for a directory as peft writes it; (the directory, None) for any other.
    Both may be names of the Hub, whose directories are in its cache.

    Raises ModelError for adapters whose base is no directory, for adapters that would compute something else, and for a
    name that cannot be downloaded.
    """
    folder = _folder(folder)
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        return folder, None
    data = read_json(path)
    try:
        base = data.get("base_model_name_or_path")
        if base == "":
            drawn = "adapters of a model that no directory has, since it was drawn from the seed (--model new)"
            raise ModelError(f"given {drawn}; needed those of a run with --model DIR")
        found = _folder(at_revision(base, data.get("revision"))) if isinstance(base, str) else None
        if found is None or not (found / CONFIG).is_file():
            needed = f"the directory of the model that the adapters are of, with a {CONFIG}"
            raise ModelError(f"given base_model_name_or_path {base!r}, needed {needed}")
        return found, Lora.from_json(data)
    except (HubError, ModelError) as error:
        raise ModelError(f"{path}: {error}") from error


def _folder(given: str | Path) -> Path:
    try:
        return Path(model_folder(str(given)))
    except HubError as error:
        raise ModelError(str(error)) from error


@lru_cache
def digest(folder: str | Path) -> str:
    """SHA-256 of a model directory's weights: of the bytes of its files of weights, and of its configuration.

    Only one of a host's processes reads the files. It notes the digest for the others, and for later runs, by the
    files' inodes, sizes, and times of change, which no user can set.
    """
    files, shape = weight_files(Path(folder)), repr(read_config(folder))
    own = [(s.st_dev, s.st_ino, s.st_size, s.st_ctime_ns) for s in map(os.stat, files)]
    with _note(hashlib.sha256(repr((shape, own)).encode()).hexdigest()) as note:
        if note is not None and len(found := note.read()) == hashlib.sha256().digest_size * 2:
            return found

        def of(path: Path) -> bytes:
            with path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").digest()

        with ThreadPoolExecutor(8) as threads:  # hashing releases the interpreter lock
            made = hashlib.sha256(b"".join([shape.encode(), *threads.map(of, files)])).hexdigest()
        if note is not None and time.time() - max(changed for *_, changed in own) * 1e-9 > SETTLED_S:
            note.write(made)
        return made


@contextmanager
def _note(name: str) -> Iterator[TextIO | None]:
    """A locked file of this user on this host; None if it cannot be opened."""
    try:
        opened = os.fdopen(
            os.open(private_folder() / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "r+"
        )
    except OSError:
        yield None
        return
    with opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield opened


M = TypeVar("M", bound=Decoder)


def load_model(
    kind: type[M],
    folder: str | Path,
    dtype: str | torch.dtype = "float32",
    device: str = "cpu",
    *,
    new_head: bool = False,
    unread: bool = False,
    lora: Lora | None = None,
    seed: int = 0,
) -> M:
    """The model of a directory, or of a name of the Hub, with weights converted to `dtype`. A `Scorer` is read from the
    layout of `LlamaForSequenceClassification` with one label; with `new_head` it has the decoder of any directory, and
    a head of zeros. With `lora` the model has adapters, drawn from the seed, or those of the directory, which must be
    equal to `lora`; they stay float32. A scorer from a directory of adapters has them merged into its weights.

    With `unread` no weight is read now: the model's `source` reads regions of them. Names and shapes are checked now.
    On the device "meta" one row of each tensor is read. Raises ModelError unless every tensor is there and fits, and
    if a number that is read is not finite.
    """
    folder = _folder(folder)
    base, saved = read_adapters(folder)
    if lora is not None and saved is not None and lora != saved:
        raise ModelError(f"{folder}: given adapters of {saved}, needed those that are asked for: {lora}")
    merges = saved is not None and issubclass(kind, Scorer)
    model = kind(read_config(folder), torch_dtype(dtype), device, lora=None if merges else saved or lora, unread=unread)
    pieces = _pieces(weight_files(base))
    adapters = {} if saved is None else saved_adapters(Path(folder), saved)
    parameters = dict(model.named_parameters())
    own = ({HEAD} if new_head else set()) | {name for name in parameters if is_adapter(name)}
    read = {name: parameter for name, parameter in parameters.items() if name not in own}
    if HEAD in read and HEAD not in pieces:
        needed = f"{HEAD} [1, hidden_size], as the program reward_model writes it"
        raise ModelError(f"{folder}: given a reward model without a head, needed {needed}")
    # A scorer does not use a language model's head. With tied embeddings, files may still have the head.
    unused = own | ({LM_HEAD} - parameters.keys())
    twice = pieces.get(LM_HEAD) if isinstance(model, CausalLM) and model.config.tie_word_embeddings else None
    check_names(read, {name: piece for name, piece in pieces.items() if name not in unused}, str(base))
    if twice is not None:
        check_shape(LM_HEAD, twice.get_shape(), parameters[EMBEDDING], str(base))
    for name, parameter in read.items():
        check_shape(name, pieces[name].get_shape(), parameter, str(base))
        if (stored := pieces[name].get_dtype()) not in _STORED:
            needed = f"one of {', '.join(_STORED)}: weights as they are, unquantised"
            raise ModelError(f"{base}: {name}: given numbers of {stored}, needed {needed}")

    def region(name: str, slices: tuple[slice, ...]) -> Tensor:
        if is_adapter(name):
            whole = parameters[name].shape
            return adapters[name][slices] if adapters else initial(name, whole, seed)[slices]
        if name in own:
            return torch.zeros(parameters[name][slices].shape)
        # Files are mapped memory: only the slice is read.
        piece: Tensor = pieces[name][slices]
        # If they differ, `transformers` would not tie them.
        if name == EMBEDDING and twice is not None and not torch.equal(piece.float(), twice[slices].float()):
            given = f"tie_word_embeddings and another {LM_HEAD} than {EMBEDDING}"
            raise ModelError(f"{base}: given {given}, needed equal ones, one of them, or tie_word_embeddings false")
        # A sum of numbers that are not finite is not finite, and needs no memory.
        if not math.isfinite(piece.sum(dtype=torch.float32)):
            raise ModelError(f"{base}: {name}: given NaN or infinity among its numbers, needed finite ones")
        place = name.removesuffix("weight")
        if saved is not None and merges and place + A in adapters:
            a, b = adapters[place + A][:, slices[1]], adapters[place + B][slices[0]]
            piece = merged(piece.float(), a, b, saved.scale)
        return piece

    if unread:
        model.source = region
    elif model.device.type == "meta":
        # Only a check: a model whose training has diverged has such numbers everywhere, and one row is read quickly.
        for name, parameter in read.items():
            *rows, width = parameter.shape
            region(name, (*(slice(0, 1) for _ in rows), slice(0, width)))
    else:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(region(name, tuple(map(slice, parameter.shape))))
    return model


def save_model(
    model: Decoder, tensors: Mapping[str, Tensor], folder: str | Path, config: ModelConfig | None = None
) -> None:
    """Write a directory that `load_model` and `transformers` can read. `tensors` are the model's weights, whole and on
    the CPU; `config` is written in place of the model's."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    head = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}} if isinstance(model, Scorer) else {}
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    facts = {"architectures": [model.architecture], **(config or model.config).to_json(dtype)}
    (folder / CONFIG).write_text(json.dumps(facts | head, indent=2) + "\n")
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        held = sum(other.nbytes for other in shards[-1].values())
        if held and held + tensor.nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = tensor
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else WEIGHTS
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def save_adapters(lora: Lora, tensors: Mapping[str, Tensor], base: str, folder: str | Path) -> None:
    """Write adapters of the model in the directory `base` to a directory that `load_model` and `peft` can read."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(lora.to_json(base), indent=2) + "\n")
    save_file({PEFT + name: tensor for name, tensor in tensors.items()}, folder / ADAPTERS, metadata={"format": "pt"})


def saved_adapters(folder: Path, lora: Lora) -> dict[str, Tensor]:
    """Saved adapters by the names of a model's parameters. Raises ModelError for adapters of another model or rank."""
    path = folder / ADAPTERS
    if not path.is_file():
        others = ", ".join(sorted(p.name for p in folder.iterdir() if p.name.startswith("adapter_model")))
        raise ModelError(f"{folder}: given {others or 'no adapters'}, needed {ADAPTERS}")
    pieces = _pieces([path])
    needed = CausalLM(read_config(folder), device="meta", lora=lora).own_parameters()
    check_names({PEFT + name: parameter for name, parameter in needed.items()}, pieces, str(path))
    for name, parameter in needed.items():
        check_shape(name, pieces[PEFT + name].get_shape(), parameter, str(path))
    return {name: pieces[PEFT + name][:] for name in needed}


def check_names(needed: Mapping[str, Any], given: Mapping[str, Any], where: str) -> None:
    """Raises ModelError unless the names on both sides are the same."""
    if missing := sorted(needed.keys() - given.keys()):
        raise ModelError(f"{where}: given no {_listed(missing)}, needed all {len(needed)} tensors of the model")
    # Old checkpoints also have rotary frequencies, which follow from `config.json`.
    extra = sorted(n for n in given.keys() - needed.keys() if not n.endswith("rotary_emb.inv_freq"))
    if extra:
        known = f"the {len(needed)} tensors of a model of this `{CONFIG}` and no other"
        raise ModelError(f"{where}: given {_listed(extra)}, not known to this family of models; needed {known}")


def check_shape(name: str, given: Sequence[int], needed: Tensor, where: str) -> None:
    """Raises ModelError unless the shape `given` is that of `needed`."""
    if tuple(given) != needed.shape:
        raise ModelError(f"{where}: {name}: given shape {list(given)}, needed {list(needed.shape)}")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def weight_files(folder: Path) -> list[Path]:
    """The files of weights of a model directory."""
    # If there are both, transformers reads the single file.
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if (folder / INDEX).exists():
        files = read_json(folder / INDEX).get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
            raise ModelError(f"{folder / INDEX}: given weight_map {files!r:.200}, needed the file of each tensor")
        paths = sorted({folder / Path(file).name for file in files.values()})
        if missing := [path.name for path in paths if not path.exists()]:
            needed = f"all files that {INDEX} names: is the download whole?"
            raise ModelError(f"{folder}: given no {_listed(missing)}, needed {needed}")
        return paths
    found = sorted(p.name for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".safetensors", ".gguf"))
    given = f"given {', '.join(found)}" if found else "given no weights"
    raise ModelError(f"{folder}: {given}, needed {WEIGHTS} or {INDEX}")


def _pieces(paths: Sequence[Path]) -> dict[str, Any]:
    """Each tensor of some files; slicing one reads the slice."""
    # The files stay open, as mapped memory.
    pieces: dict[str, Any] = {}
    for path in paths:
        try:
            file: Any = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            if path.is_file() and path.open("rb").read(len(LFS)) == LFS:
                raise ModelError(f"{path}: given a pointer of Git LFS, needed the file: git lfs pull") from None
            needed = "a whole safetensors file: is the download whole?"
            raise ModelError(f"{path}: given a file that cannot be read: {error}, needed {needed}") from error
        pieces |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
    return pieces


def point_at(model: Decoder, tensors: Mapping[str, Tensor], where: str) -> None:
    """Make the model compute with these tensors without a copy (on another device, with copies). They must be all of
    its own parameters, and fit."""
    parameters = model.own_parameters()
    check_names(parameters, tensors, where)
    for name, parameter in parameters.items():
        tensor = tensors[name]
        check_shape(name, tensor.shape, parameter, where)
        if tensor.dtype != parameter.dtype:
            raise ModelError(f"{where}: {name}: given dtype {tensor.dtype}, needed {parameter.dtype}")
        parameter.data = tensor.to(parameter.device)

"""Hugging Face model directories, in and out: `config.json`, safetensors, and the tokenizer's files copied along."""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from penstock.nodes.model.config import ModelConfig, ModelError
from penstock.nodes.model.llama import Llama

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
SHARD_BYTES = 4 << 30
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that a flag or a `config.json` names."""
    if name not in _DTYPES:
        raise ModelError(f"given dtype {name!r}, needed one of: {', '.join(_DTYPES)}")
    return _DTYPES[name]


def read_config(folder: str | Path) -> ModelConfig:
    path = Path(folder) / CONFIG
    try:
        return ModelConfig.from_json(json.loads(path.read_bytes()))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from error


def load_model(folder: str | Path, dtype: str = "float32", device: str = "cpu") -> Llama:
    """The model of a directory, its weights converted to `dtype`. Every tensor must be there and fit."""
    model = Llama(read_config(folder), torch_dtype(dtype), device)
    parameters = dict(model.named_parameters())
    places = _places(Path(folder))
    check_names(parameters, places, str(folder), tied=model.lm_head is None)
    for path in sorted(set(places.values())):
        for name, tensor in _read(path, [n for n in parameters if places[n] == path]):
            check_shape(name, tensor, parameters[name], str(path))
            with torch.no_grad():
                parameters[name].copy_(tensor)
    return model


def save_model(
    model: Llama, folder: str | Path, tokenizer_from: str | Path | None = None, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write a directory that `load_model` and `transformers` read, with the tokenizer's files of `tokenizer_from`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = str(model.head_weight().dtype).removeprefix("torch.")
    (folder / CONFIG).write_text(json.dumps(model.config.to_json(dtype), indent=2) + "\n")
    tensors = {name: p.detach().cpu().contiguous() for name, p in model.named_parameters()}
    _write(tensors, folder, shard_bytes)
    for name in TOKENIZER_FILES if tokenizer_from is not None else ():
        source = Path(str(tokenizer_from)) / name
        if source.exists() and not (folder / name).exists():
            shutil.copyfile(source, folder / name)


def check_names(needed: Mapping[str, Any], given: Mapping[str, Any], where: str, *, tied: bool = False) -> None:
    """The same names on both sides; what follows from other tensors or from `config.json` may be there too."""
    if missing := sorted(needed.keys() - given.keys()):
        raise ModelError(f"{where}: {_listed(missing)} missing; the model needs {len(needed)} tensors")
    extra = sorted(n for n in given.keys() - needed.keys() if not n.endswith("rotary_emb.inv_freq"))
    if tied and "lm_head.weight" in extra:
        extra.remove("lm_head.weight")
    if extra:
        raise ModelError(f"{where}: {_listed(extra)} not known to this family of models")


def check_shape(name: str, given: Tensor, needed: Tensor, where: str) -> None:
    if given.shape != needed.shape:
        raise ModelError(f"{where}: {name}: given shape {list(given.shape)}, needed {list(needed.shape)}")


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{shown} {'is' if len(names) == 1 else 'are'}"


def _places(folder: Path) -> dict[str, Path]:
    """The file of each tensor."""
    if (folder / INDEX).exists():
        try:
            files: dict[str, str] = json.loads((folder / INDEX).read_bytes())["weight_map"]
        except (ValueError, KeyError) as error:
            raise ModelError(f"{folder / INDEX}: cannot be read: {error!r}, needed a weight_map") from error
        return {name: folder / Path(file).name for name, file in files.items()}
    if (folder / WEIGHTS).exists():
        with _open(folder / WEIGHTS) as file:
            return dict.fromkeys(file.keys(), folder / WEIGHTS)
    found = sorted(p.name for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".safetensors", ".gguf"))
    given = f"given {', '.join(found)}" if found else "given no weights"
    raise ModelError(f"{folder}: {given}, needed {WEIGHTS} or {INDEX}")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error


def _read(path: Path, names: list[str]) -> Iterator[tuple[str, Tensor]]:
    with _open(path) as file:
        inside = set(file.keys())
        for name in names:
            if name not in inside:
                raise ModelError(f"{path}: {name} is missing; {INDEX} says that it is there")
            yield name, file.get_tensor(name)


def _write(tensors: dict[str, Tensor], folder: Path, shard_bytes: int) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    room = shard_bytes
    for name, tensor in tensors.items():
        if tensor.nbytes > room and shards[-1]:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = tensor
        room -= tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / WEIGHTS, metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def point_at(model: Llama, tensors: Mapping[str, Tensor], where: str) -> None:
    """Make the model compute with these very tensors (copies, if on another device). All must be there and fit."""
    parameters = dict(model.named_parameters())
    check_names(parameters, tensors, where)
    for name, parameter in parameters.items():
        tensor = tensors[name]
        check_shape(name, tensor, parameter, where)
        if tensor.dtype != parameter.dtype:
            raise ModelError(f"{where}: {name}: given dtype {tensor.dtype}, needed {parameter.dtype}")
        parameter.data = tensor.to(parameter.device)

"""`python -m penstock.nodes.model.merge ADAPTERS FOLDER` merges adapters into their base.

It writes the base's directory with W + alpha / rank · B A in place of W, added in float32 and rounded once to the dtype
of W; one file of weights at a time.
"""

import shutil
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

from penstock.nodes.model.config import ModelError
from penstock.nodes.model.hf import read_adapters, saved_adapters, weight_files
from penstock.nodes.model.lora import A, B, merged
from penstock.nodes.tokenizer import GENERATION

# Suffixes of the base's other files that are copied: configuration, index of weights, tokenizer.
KEPT = (".json", ".jinja", ".model", ".txt")


def merge(adapters: Path, folder: Path) -> None:
    """Write the merged model into an empty folder. Raises ModelError for a directory without adapters, or for adapters
    that do not fit their base."""
    base, lora = read_adapters(adapters)
    if lora is None:
        raise ModelError(f"{adapters}: given a whole model, which opens as it is, needed adapters to merge")
    own = saved_adapters(adapters, lora)
    for path in weight_files(base):
        tensors = load_file(path)
        for name, weight in tensors.items():
            place = name.removesuffix("weight")
            if place + A in own:
                tensors[name] = merged(weight, own[place + A], own[place + B], lora.scale)
        save_file(tensors, folder / path.name, metadata={"format": "pt"})
    # A checkpoint's adapters say where the run's responses stopped.
    for path in (*base.iterdir(), adapters / GENERATION):
        if path.suffix in KEPT and path.is_file():
            shutil.copyfile(path, folder / path.name)


if __name__ == "__main__":
    try:
        merge(Path(sys.argv[1]), Path(sys.argv[2]))
    except ModelError as error:
        sys.exit(str(error))

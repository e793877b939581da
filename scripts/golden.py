"""Compare what users see with kept files: the outputs of all verbs on all programs, and the bits of short runs.

    python scripts/golden.py                     compare this tree with tests/golden
    python scripts/golden.py --write             write tests/golden
    python scripts/golden.py --against COMMIT    compare this tree with another commit, to the byte
    python scripts/golden.py --only aipo toy     some programs

Every verb is called in a child that is forked from one process with torch and Penstock loaded, so that all programs
take about a minute. The processes that a verb starts (the one that traces, the one of `--in-process`) are forked, too.
Their clock is virtual: only `time.sleep` advances it, and returns at once. So durations in a run of fake nodes are the
same each time.

The location of a module is not compared: import paths lose their modules, a line number in a program is replaced by the
text of that line, and one in another file is left out. tests/golden holds short outputs as text and long ones as
hashes. It holds nothing that depends on the machine: floats are rounded to a few digits, and digests of tensors are
left out; `--against` compares those as well.
"""

import argparse
import contextlib
import difflib
import gc
import hashlib
import importlib
import json
import linecache
import os
import pkgutil
import re
import runpy
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
HASHES = "hashes.json"
CORES = 2
"""The number of cores that the programs see."""
TEXT_BYTES = 25_000
"""The length of the longest output that tests/golden keeps as text."""
HASHED = (".svg", ".html", "/help.txt", "/simulate-trace.json")
"""Outputs that tests/golden keeps as a hash at any length; `--against` shows how they differ."""
LOCAL = "/local/"
"""Part of the names of outputs that depend on the machine. Only `--against` makes them and compares them."""
TICKS = 2**20
"""Ticks of the virtual clock per second. Its times are exact floats: a sleep until a given time ends at the first tick
that is not before it, even if it is split into several sleeps, so that the times of a run do not depend on how often
nodes are polled."""
DIGITS = 5
"""Digits of floats in tests/golden."""

DIGITS_RULE = """

def share_of_digits(prompt: str, response: str, answer: str) -> float:
    return sum(map(str.isdigit, response)) / 3
"""
"""The reward function of the runs. An untrained policy gets some reward from it, and so has something to learn from."""
PLAN = ("--cluster", "2x8xH100", "--model", "llama-8b", "--batch", "64")
SMALL = ("--model", "new", "--batch", "2", "--max-tokens", "3", "--slots", "8", "--eval-groups", "2", "--updates", "3")
SAMPLED = (*SMALL, "--samples", "4")
RUNS: Mapping[str, tuple[str, ...]] = {
    "toy": ("--batch", "2", "--updates", "6", "--jitter-ms", "20"),
    "aipo": SAMPLED,
    "replay": (*SAMPLED, "--take", "2"),
    "ppo": SAMPLED,
    "dapo": (*SAMPLED, "--buffer", "2", "--versions", "free"),
    "online_dpo": SMALL,
    "guessing": (*SMALL, "--samples", "8"),
    "sft": SMALL,
}
"""The options of the programs that are run in one process. Versions are pinned unless a filter forbids it."""
ANYWHERE = "toy"
"""The program of fake nodes: everything in its run except the tensors is the same on every machine."""

VERBS = ("run", "resume", "show", "check", "plan", "simulate", "report", "watch", "replay", "export", "agent", "doctor")

Output = Callable[[str, str], None]
"""Takes the name of an output and its text."""


# The process of one tree, which calls the verbs and writes their outputs.


class Clock:
    """A clock that only `sleep` advances while it is `virtual`; otherwise it is the real one."""

    def __init__(self) -> None:
        self.virtual = False
        self.elapsed_ticks = 0
        self._real = {name: getattr(time, name) for name in ("monotonic", "perf_counter", "process_time", "time")}
        self._sleep = time.sleep

    def install(self) -> None:
        """Replace the functions of `time`. Modules that were imported before keep the real ones."""
        for name, began in (("monotonic", 1000), ("perf_counter", 1000), ("process_time", 0), ("time", 1_700_000_000)):
            setattr(time, name, self._reader(name, began))
        time.sleep = self.sleep  # type: ignore[assignment]

    def sleep(self, seconds: float) -> None:
        if self.virtual:
            self.elapsed_ticks += max(0, ceil(seconds * TICKS))
        else:
            self._sleep(seconds)

    def _reader(self, name: str, began: int) -> Callable[[], float]:
        real = self._real[name]
        return lambda: began + self.elapsed_ticks / TICKS if self.virtual else real()


CLOCK = Clock()


class Forked(subprocess.Popen[Any]):
    """Fork `python -P -m MODULE …` without redirections from this process, which has imported what it needs."""

    def _execute_child(self, args: Any, executable: Any, *rest: Any) -> None:
        words = [os.fspath(word) for word in args if word != "-P"] if not isinstance(args, str) else []
        if words[:2] != [sys.executable, "-m"] or any(pipe != -1 for pipe in rest[8:14]):
            super()._execute_child(args, executable, *rest)  # type: ignore[misc]
            return
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        self._child_created = True
        if self.pid == 0:
            leave(lambda: run_module(words[2], words[3:]))


def run_module(name: str, words: Sequence[str]) -> None:
    CLOCK.elapsed_ticks = 0  # the time that the parent has waited, for a lock for example, differs between runs
    sys.argv = [name, *words]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runpy.run_module(name, run_name="__main__", alter_sys=True)


def leave(work: Callable[[], None]) -> None:
    """Do the work of a forked process, then end the process."""
    status = 0
    try:
        work()
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def serve_tree(tree: Path, out: Path, programs: Sequence[str], local: bool) -> None:
    """Write the outputs of each of a tree's programs into a folder of its own, the machine-dependent ones only if
    `local`. The tree's `src` is on PYTHONPATH."""
    gc.disable()  # imported objects stay; collecting among them takes a tenth of the time of the imports
    import torch  # before the clock is replaced, like the standard library above

    CLOCK.install()
    secrets.token_hex = lambda nbytes=None: "ab" * (nbytes or 32)
    os.cpu_count = lambda: CORES
    os.sched_getaffinity = lambda pid: set(range(CORES))
    torch.cuda.is_available = lambda: False
    main = load(tree)
    subprocess.Popen = Forked  # type: ignore[misc]
    CLOCK.virtual = True
    gc.freeze()  # otherwise the first collection in each process would write to every page and so copy it
    gc.enable()
    children: dict[int, tuple[str, Path]] = {}
    waiting = list(programs)
    while waiting or children:
        while waiting and len(children) < CORES:
            program = waiting.pop(0)
            scratch = Path(tempfile.mkdtemp(prefix="penstock-golden-"))
            pid = os.fork()
            if pid == 0:
                leave(partial(call_verbs, main, tree, out, program, scratch, local))
            children[pid] = program, scratch
        pid, status = os.wait()
        program, scratch = children.pop(pid)
        shutil.rmtree(scratch, ignore_errors=True)
        if status:
            raise SystemExit(f"{program}: the process that called its verbs failed")
    gc.unfreeze()  # otherwise triton reports leaks at the end


def load(tree: Path) -> Callable[[Sequence[str]], None]:
    """Import all modules of the tree that children may need, and return the command's function."""
    import penstock

    if Path(penstock.__path__[0]).resolve() != tree.resolve():
        raise SystemExit(f"given {penstock.__path__[0]}, needed the modules of {tree}")
    for package in ("graph", "programs", "runtime", "nodes"):
        for module in pkgutil.walk_packages([str(tree / package)], f"penstock.{package}."):
            if not module.name.endswith("__main__"):
                with contextlib.suppress(Exception, SystemExit):
                    importlib.import_module(module.name)
    script = re.search(r'^penstock = "(.+)"', (tree / "pyproject.toml").read_text(), re.M)
    assert script is not None
    place, _, name = script[1].partition(":")
    command: Callable[[Sequence[str]], None] = getattr(importlib.import_module(place), name)
    return command


def call_verbs(main: Any, tree: Path, out: Path, program: str, scratch: Path, local: bool) -> None:
    """Write all outputs of one program; `penstock` stands for the command itself."""
    os.chdir(scratch)
    os.environ["PENSTOCK_CACHE"] = str(scratch / "cache")
    folder = out / program
    folder.mkdir(parents=True)
    clean = Cleaner(tree, scratch)

    def write(name: str, text: str) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(clean(text))

    def call(name: str, *words: str) -> str:
        printed = printed_by(main, words, scratch)
        write(name, printed)
        return printed

    if program == "penstock":
        call("help.txt")
        for verb in VERBS:
            call(f"{verb}.txt", verb, "--help")
        return
    call("help.txt", "run", program, "--help")
    for format in ("text", "mermaid", "svg"):
        call(f"show.{format}", "show", program, "--format", format)
    graph = call("show.json", "show", program, "--json")
    call("evaluation.text", "show", program, "--evaluation")
    call("check.txt", "check", program, "--model", "new")
    call("check.json", "check", program, "--json", "--batch", "3", "--max-tokens", "0")
    call("plan.txt", "plan", program, *PLAN)
    call("plan.json", "plan", program, *PLAN, "--json")
    simulate(call, write, program, json.loads(graph))
    if program == ANYWHERE or (local and program in RUNS):
        source = (tree / "programs" / f"{program}.py").read_text()
        (scratch / f"{program}.py").write_text(source.replace("by=math_answer", "by=share_of_digits") + DIGITS_RULE)
        run(call, write, program, scratch)


def simulate(call: Any, write: Output, program: str, graph: Mapping[str, Any]) -> None:
    """Simulate the schedule with durations that differ by node, and the schedule of a plan."""
    words = ["simulate", program, "--updates", "6", "--batch", "4", "--width", "100"]
    durations = [
        f"{node['name'].partition(':')[0]}=0.0{1 + place % 9}~0.3"
        for place, node in enumerate(graph["nodes"])
        if node["construct"] not in ("broadcast", "delay") and "ms" not in node["options"]
    ]
    given = [*words, "--duration", *durations, "publish=0.002", "wire=0.003", "swap=0.001"]
    call("simulate.txt", *given)
    call("simulate.json", *given, "--json", "--svg", "schedule.svg", "--html", "schedule.html", "--trace", "trace.json")
    for path in map(Path, ("schedule.svg", "schedule.html", "trace.json")):
        if path.exists():
            write(f"simulate-{path.stem}{path.suffix}", path.read_text())
    call("simulate-plan.txt", *words, *PLAN[:4])


def run(call: Any, write: Output, program: str, scratch: Path) -> None:
    """Run in one process, and write what the run prints, the files it leaves, and what the verbs print about them."""
    pinned = ("--in-process", "--versions", "pinned", "--device", "cpu", "--out", "run")
    place = "" if program == ANYWHERE else "local/"
    call(f"{place}run.txt", "run", f"{program}.py:{program}", *pinned, *RUNS[program])
    folder = scratch / "run"
    if not folder.exists():  # the run was refused
        return
    write(f"{place}run-events.jsonl", "\n".join(events(folder / "events.log")))
    for name in ("config.json", "plan.json", "summary.json", "metrics.jsonl", "trace.json"):
        write(f"{place}run-{name}", (folder / name).read_text())
    write("local/run-tensors.txt", "\n".join(tensors(folder / "checkpoints")))
    call(f"{place}report.txt", "report", "run")
    call(f"{place}report.json", "report", "run", "--json")
    write("local/report.html", (folder / "report.html").read_text())
    call(f"{place}replay.txt", "replay", "run")


def printed_by(main: Any, words: Sequence[str], scratch: Path) -> str:
    """Return what the command and its children print, and the exit status if it is not 0."""
    status: Any = 0
    with (scratch / "printed").open("w+") as file, (scratch / "complained").open("w+") as errors:
        kept = os.dup(1), os.dup(2)
        os.dup2(file.fileno(), 1)
        os.dup2(errors.fileno(), 2)
        try:
            main(list(words))
        except SystemExit as leaving:
            status = leaving.code
        except BaseException:
            traceback.print_exc()
            status = "raised"
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for copy, number in zip(kept, (1, 2), strict=True):
                os.dup2(copy, number)
                os.close(copy)
        file.seek(0)
        errors.seek(0)
        complained = errors.read()
        return file.read() + (f"stderr:\n{complained}" if complained else "") + (f"exit {status}\n" if status else "")


def events(path: Path) -> Iterator[str]:
    """Yield the records of an event log, one per line, without their digests; `runtime/record` has the format."""
    from msgspec import msgpack

    data = path.read_bytes()
    place = data.index(b"\n") + 1
    yield data[:place].decode().strip()
    while place < len(data):
        length = int.from_bytes(data[place : place + 4], "little")
        record = msgpack.decode(data[place + 8 : place + 8 + length])
        place += 8 + length + 16
        if record[0] == "event":
            record = [*record[:2], msgpack.decode(record[2])]
        yield json.dumps(record, default=bytes.hex)


def tensors(folder: Path) -> Iterator[str]:
    """Yield a digest of every tensor below a folder."""
    import torch
    from safetensors.torch import load_file

    for path in sorted(folder.rglob("*.safetensors")):
        for name, tensor in sorted(load_file(path).items()):
            data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
            digest = hashlib.sha256(data).hexdigest()
            yield f"{path.relative_to(folder)} {name} {tensor.dtype} {list(tensor.shape)} {digest}"


class Cleaner:
    """Remove from a text what is not compared: paths of files, modules, dates."""

    def __init__(self, tree: Path, scratch: Path) -> None:
        self.tree, self.scratch = str(tree), str(scratch)
        self._place = re.compile(
            rf"(?:{re.escape(self.tree)}/)?\b((?:graph|nodes|runtime|programs)/[\w/]*\w\.py)(?::(\d+)|\", line (\d+))?"
        )

    def __call__(self, text: str) -> str:
        text = self._place.sub(self._source, text.replace(self.scratch, "SCRATCH"))
        text = re.sub(r"SCRATCH/(\w+\.py):(\d+)", lambda m: f"{m[1]} {_line(f'{self.scratch}/{m[1]}', m[2])}", text)
        text = re.sub(r"\bpenstock(?:\.\w+)+:(?=\w)", "penstock:", text)
        text = re.sub(r"\bpenstock(?:\.[a-z_]\w*)+", "penstock.*", text)
        text = re.sub(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?(\.\d+)?([+-]\d\d:\d\d|Z)?", "DATE", text)
        return _ordered(text) if text.startswith("{\n") else "\n".join(map(_ordered, text.split("\n")))

    def _source(self, match: re.Match[str]) -> str:
        """Return the text of a program's line. Locations in other files change often and are left out."""
        path, line = match[1], match[2] or match[3]
        if not path.startswith("programs/"):
            return "SOURCE"
        if not line:
            return path
        return f"{path} {_line(f'{self.tree}/{path}', line)}"


def _line(path: str, number: str) -> str:
    """Return the text of a line in a form that is valid within JSON text."""
    return f"«{linecache.getline(path, int(number)).strip()}»".replace('"', "'").replace("\\", "/")


def _ordered(text: str) -> str:
    """Return JSON text with keys that are import paths sorted: their order was by module."""
    if '"penstock:' not in text:
        return text
    try:
        value = json.loads(text)
    except ValueError:
        return text
    indent = 1 if text.startswith("{\n") else None
    if json.dumps(value, indent=indent).strip() != text.strip():
        return text
    return json.dumps(_by_path(value), indent=indent) + text[len(text.rstrip()) :]


def _by_path(value: Any) -> Any:
    if isinstance(value, list):
        return [_by_path(item) for item in value]
    if not isinstance(value, dict):
        return value
    paths = any(key.startswith("penstock:") for key in value)
    return {key: _by_path(item) for key, item in (sorted(value.items()) if paths else value.items())}


# Comparing.


def outputs(tree: Path, scratch: Path, programs: Sequence[str], local: bool = False) -> Path:
    """Return the folder with a tree's outputs, made by a process that imports the tree's modules."""
    out = scratch / f"out-{secrets.token_hex(4)}"
    out.mkdir()
    environment = os.environ | {
        "PYTHONPATH": str(tree / "src"),
        "PYTHONHASHSEED": "0",
        "COLUMNS": "100",
        "LINES": "40",
        "TERM": "dumb",
        "LC_ALL": "C.UTF-8",
        "OMP_WAIT_POLICY": "passive",
    }
    words = [sys.executable, str(Path(__file__).resolve()), "--tree", str(tree), "--out", str(out), "--only", *programs]
    words += ["--local"] if local else []
    subprocess.run(words, env=environment, cwd=scratch, check=True, timeout=900)
    return out


def built_in(tree: Path) -> list[str]:
    """Return the programs of a tree, and `penstock` for the command itself."""
    return ["penstock", *sorted(path.stem for path in (tree / "programs").glob("[a-z]*.py"))]


def texts(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


def kept(outputs: Mapping[str, str]) -> dict[str, str]:
    """Return outputs as tests/golden keeps them: hashes of the long ones, and nothing that depends on the machine."""
    files, hashes = {}, {}
    for name, text in outputs.items():
        if LOCAL in name:
            continue
        text = re.sub(r"-?\d+\.\d{4,}(e-?\d+)?", lambda match: f"{float(match[0]):.{DIGITS}g}", text)
        text = re.sub(r"\b[0-9a-f]{16,}\b", "DIGEST", text)
        if name.endswith(HASHED) or len(text) > TEXT_BYTES:
            hashes[name] = hashlib.sha256(text.encode()).hexdigest()
        else:
            files[name] = text
    return files | {HASHES: json.dumps(hashes, indent=1) + "\n"}


def differences(old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of a unified diff of all outputs."""
    for name in sorted({*old, *new}):
        before, after = (side.get(name, "").splitlines(keepends=True) for side in (old, new))
        for line in difflib.unified_diff(before, after, f"before/{name}", f"after/{name}"):
            yield line if line.endswith("\n") else f"{line}\n"


def golden(programs: Sequence[str]) -> dict[str, str]:
    """Return what tests/golden has for some programs."""
    files = {name: text for name, text in texts(GOLDEN).items() if name.partition("/")[0] in programs}
    hashes = json.loads((GOLDEN / HASHES).read_text())
    wanted = {name: digest for name, digest in hashes.items() if name.partition("/")[0] in programs}
    return files | {HASHES: json.dumps(wanted, indent=1) + "\n"}


def compared(programs: Sequence[str]) -> str:
    """Return the diff between tests/golden and this tree's outputs; "" if they are equal."""
    with tempfile.TemporaryDirectory() as scratch:
        return "".join(differences(golden(programs), kept(texts(outputs(ROOT, Path(scratch), programs)))))


def compared_with(commit: str, programs: Sequence[str]) -> str:
    """Return the diff between all outputs of a commit and of this tree; "" if they are equal."""
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "tree"
        subprocess.run(["git", "worktree", "add", "--detach", "-f", str(tree), commit], cwd=ROOT, check=True, stdout=2)
        try:
            common = [name for name in programs if name in built_in(tree)]
            old, new = (texts(outputs(place, Path(scratch), common, local=True)) for place in (tree, ROOT))
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)
        return "".join(differences(old, new))


def write(programs: Sequence[str]) -> None:
    """Write tests/golden; the files of other programs stay as they are."""
    with tempfile.TemporaryDirectory() as scratch:
        found = kept(texts(outputs(ROOT, Path(scratch), programs)))
    hashes = json.loads((GOLDEN / HASHES).read_text()) if (GOLDEN / HASHES).exists() else {}
    others = {name: digest for name, digest in hashes.items() if name.partition("/")[0] not in programs}
    found[HASHES] = json.dumps(dict(sorted((others | json.loads(found[HASHES])).items())), indent=1) + "\n"
    for program in programs:
        shutil.rmtree(GOLDEN / program, ignore_errors=True)
    for name, text in found.items():
        (GOLDEN / name).parent.mkdir(parents=True, exist_ok=True)
        (GOLDEN / name).write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write tests/golden")
    parser.add_argument("--against", metavar="COMMIT", help="compare with another commit instead, to the byte")
    parser.add_argument("--only", nargs="+", metavar="PROGRAM", help="some programs; `penstock` is the command's help")
    parser.add_argument("--tree", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--local", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.tree:
        serve_tree(args.tree, args.out, args.only, args.local)
        return
    programs = args.only or built_in(ROOT)
    if args.write:
        write(programs)
        return
    found = compared_with(args.against, programs) if args.against else compared(programs)
    print(found, end="")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()

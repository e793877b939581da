"""A test instrument in place of `kubectl`, since the tests have no API server."""

import json
import sys
from pathlib import Path

INSTRUMENT = '''#!{python}
"""A test instrument, not kubectl: records what it is given, and answers what the test has written down."""
import json, pathlib, sys, time
folder = pathlib.Path(__file__).parent
text = "" if sys.stdin is None or "-f" not in sys.argv else sys.stdin.read()
with (folder / "calls.jsonl").open("a") as calls:
    calls.write(json.dumps([sys.argv[1:], text]) + "\\n")
answers = json.loads((folder / "answers.json").read_text())
key = next(key for key in answers if key in " ".join(sys.argv[1:]))
status, out, err, *wait = answers[key].pop(0) if len(answers[key]) > 1 else answers[key][0]
(folder / "answers.json").write_text(json.dumps(answers))
if "logs" in sys.argv:
    # Lines begin with their times. kubectl tells Kubernetes of the second alone since which they are asked for.
    since = sys.argv[sys.argv.index("--since-time") + 1][:19] if "--since-time" in sys.argv else ""
    lines = [line for line in out.splitlines(keepends=True) if line[:19] >= since]
    out = "".join(line if "--timestamps" in sys.argv else line.partition(" ")[2] for line in lines)
sys.stdout.write(out)
sys.stdout.flush()
sys.stderr.write(err)
time.sleep(sum(wait))
sys.exit(status)
'''
Answers = dict[str, list[tuple[int, str, str] | tuple[int, str, str, float]]]
"""Answers by words of a call: exit status, standard output, standard error, and optionally seconds until the call ends.
Several answers are given in turn, and the last one is repeated. Log lines begin with a UTC time and a blank, which the
instrument prints only with --timestamps."""


def pods(name: str, phase: str, made: int = 1, **status: object) -> tuple[int, str, str]:
    """The answer to "get pods": the controller's Pod with this name and phase, created at second `made`."""
    labels = {"jobset.sigs.k8s.io/replicatedjob-name": "controller"}
    begun = f"2026-01-01T00:00:{made:02}Z"
    pod = {
        "metadata": {"name": name, "labels": labels, "creationTimestamp": begun},
        "status": {"phase": phase, **status},
    }
    return 0, json.dumps({"items": [pod]}), ""


def line(at: str, text: str) -> str:
    """A log line at a second (such as "07.5") of a minute."""
    return f"2026-01-01T00:00:{at}Z {text}\n"


class Kubectl:
    """The instrument, as the only program in PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / "kubectl"
        path.write_text(INSTRUMENT.format(python=sys.executable))
        path.chmod(0o700)

    def answer(self, answers: Answers) -> None:
        (self.folder / "answers.json").write_text(json.dumps(answers))

    @property
    def calls(self) -> list[tuple[list[str], str]]:
        return [tuple(json.loads(line)) for line in (self.folder / "calls.jsonl").read_text().splitlines()]

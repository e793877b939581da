"""An instrument in the place of `kubectl`, since no API server can be had here. It is not kubectl, and says so."""

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
sys.stdout.write(out)
sys.stdout.flush()
sys.stderr.write(err)
time.sleep(sum(wait))
sys.exit(status)
'''
Answers = dict[str, list[tuple[int, str, str] | tuple[int, str, str, float]]]
"""By words of a call: exit statuses, what goes to standard output and error, and perhaps seconds until it ends; of
several for equal words one after the other, and the last one from then on."""


class Kubectl:
    """The instrument, the only thing in PATH."""

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

"""A stand-in for a rank's process: it connects, says Ready and waits for its goodbye. No torch, no nodes.

FAKE_RANK says how it misbehaves: "raise" ends with a traceback, "deaf" ignores its goodbye and a lost controller,
"family" does so, too, and starts a child of its own. "loud" prints numbered lines as long as it lives.
"""

import json
import os
import random
import subprocess
import sys
from itertools import count
from pathlib import Path
from time import monotonic, sleep

from penstock.runtime.control.messages import Goodbye, Note, Ready
from penstock.runtime.control.process import serve_forks
from penstock.runtime.control.rendezvous import HeartbeatThread
from penstock.runtime.control.security import Join
from penstock.runtime.control.sockets import Client
from penstock.runtime.tensor.shm import SHM, create_segment, segment_name

LOADED = random.random()
"""Drawn once, by what forks."""


def asked(word: str, paper: str) -> int:
    """What is asked of what forks ranks, before there is a run."""
    if word == "wait":
        sleep(1000)
    print(word)
    with os.fdopen(int(paper), "w") as file:
        json.dump({"environment": dict(os.environ), "parent": os.getppid(), "drawn": LOADED}, file)
    return 7


def main() -> None:
    mode = os.environ.get("FAKE_RANK", "")
    join = Join.read(Path(os.environ["PENSTOCK_JOIN"]))
    replica, rank = os.environ["PENSTOCK_REPLICA"], int(os.environ["PENSTOCK_RANK"])
    owner = f"{replica}.{rank}".replace("/", ".")
    create_segment(segment_name(join.run, owner, 0), 1, [SHM])  # as a store leaves when it is killed
    print("out of a rank")
    print("said by a rank", file=sys.stderr, flush=True)
    if mode == "raise":
        raise MemoryError("no room for a model")
    if mode == "family":
        subprocess.Popen(["sleep", "1000"])
    pulse = HeartbeatThread(join, replica, rank).start()
    client = Client(join, "rank", replica, rank)
    environment = {k: v for k, v in os.environ.items() if k.startswith(("PENSTOCK_", "OMP_", "MKL_", "FAKE_"))}
    facts = {"parent": os.getppid(), "session": os.getsid(0), "drawn": random.random(), "loaded": LOADED}
    client.send(Note("warning", json.dumps({"environment": environment, "arguments": sys.argv, **facts})))
    client.send(Ready(replica, rank, os.getpid()))
    numbers = count()
    while True:
        heard = client.receive(0.1)
        for lines in (sys.stdout, sys.stderr) if mode == "loud" else ():
            lines.writelines(f"line {next(numbers)}\n" for _ in range(1000))
            lines.flush()
        if mode not in ("deaf", "family") and (
            client.lost(monotonic()) > 10 or any(isinstance(m, Goodbye) for m in heard)
        ):
            break
    pulse.stop()
    client.close()


if __name__ == "__main__":
    # Processes of a run have neither the current folder nor that of a script in their path.
    sys.path.append(str(Path(__file__).parent))
    serve_forks(main, asks=int(sys.argv[2]) if sys.argv[1:] else None)

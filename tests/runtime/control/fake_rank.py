"""A fake rank: it connects, sends Ready and waits for its Goodbye, without torch or nodes.

FAKE_RANK says how it misbehaves. "raise": it ends with a traceback. "raised": it prints one and goes on.
"deaf": it ignores its Goodbye and the loss of the controller. "family": as "deaf", with a child process of its own.
"loud": it prints numbered lines without end.
"""

import json
import os
import random
import subprocess
import sys
import traceback
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
"""Drawn once, in the fork server, so that all forked ranks share it."""


def asked(word: str, paper: str) -> int:
    """Answer a question to the fork server before there is a run."""
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
    create_segment(segment_name(join.run, owner, 0), 1, [SHM])  # as a killed store leaves it
    print("out of a rank")
    print("said by a rank", file=sys.stderr, flush=True)
    if mode in ("raise", "raised"):
        try:
            raise MemoryError("no room for a model")
        except MemoryError:
            if mode == "raise":
                raise
            traceback.print_exc()
    if mode == "family":
        subprocess.Popen(["sleep", "1000"])
    pulse = HeartbeatThread(join, replica, rank).start()
    client = Client(join, "rank", replica, rank)
    environment = {k: v for k, v in os.environ.items() if k.startswith(("PENSTOCK_", "OMP_", "GOMP_", "MKL_", "FAKE_"))}
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
    # Processes of a run have neither the current folder nor their script's folder in their path.
    sys.path.append(str(Path(__file__).parent))
    serve_forks(main, asks=int(sys.argv[2]) if sys.argv[1:] else None)

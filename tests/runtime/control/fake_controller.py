"""A fake controller: it starts one rank on each host, and ends as FAKE_CONTROLLER says.

"done": when all ranks are ready. "wait": on a stop request or a death. "deaf": never. "raise": at once. "fail": on a
stop request, with an error. "writing": on a stop request, after writing a checkpoint, which it reports; after a
preemption, the write never ends. "flood": like "wait", but it prints notes without end.
"""

import json
import os
import sys
import threading
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from penstock.runtime.control.early import EARLY, awaited
from penstock.runtime.control.messages import AgentReady, Exited, Goodbye, Launch, Ready
from penstock.runtime.control.process import die_with_parent
from penstock.runtime.control.security import ServerKeys
from penstock.runtime.control.signals import ignore_stop_signals
from penstock.runtime.control.sockets import Server

told: list[str] = []


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def listen() -> None:
    while line := sys.stdin.readline():
        told.append(line.strip())


def talk() -> None:
    note = json.dumps({"kind": "note", "text": "x" * 100_000}) + "\n"
    while True:
        os.write(1, note.encode())


def main() -> int:
    die_with_parent()
    ignore_stop_signals()
    folder = Path(awaited() if sys.argv[1] == EARLY else sys.argv[1])
    mode = os.environ["FAKE_CONTROLLER"]
    if mode == "raise":
        raise RuntimeError("no such graph")
    ranks = {f"{host}-pool/0:0": host for host in os.environ["FAKE_HOSTS"].split()}
    server = Server(ServerKeys.read(folder / "keys" / "controller.json"), ranks)
    threading.Thread(target=listen, daemon=True).start()
    print("a library says hello", flush=True)
    say(kind="listening", endpoint=server.endpoint)
    hosts: list[str] = []
    pids: dict[str, int] = {}
    status = None
    while status is None:
        for peer, message in server.receive(0.05):
            match message:
                case AgentReady(host=host, pid=pid):
                    hosts.append(host)
                    pids[peer] = pid
                    server.send(peer, Launch(f"{host}-pool/0", 0))
                case Ready(replica=replica, pid=pid):
                    pids[replica] = pid
                    if len(pids) == 2 * len(ranks):
                        pools = {"trainer": {"doing": ["update[3]"]}}
                        say(kind="status", stage="train", update=2, updates=9, pools=pools)
                        say(kind="row", row={"update": 2})
                        say(kind="ready", controller=os.getpid(), pids=pids)
                        status = 0 if mode == "done" else None
                        if mode == "flood":
                            threading.Thread(target=talk, daemon=True).start()
                case Exited(replica=replica, rank=rank, reason=reason):
                    say(kind="error", text=f"{replica} rank {rank} died: {reason}")
                    status = 1
        if told and mode != "deaf":
            if mode != "flood":
                say(kind="told", line=told[0])
            if mode == "writing":
                say(kind="writing", seconds=60.0)
                sleep(3600.0 if told[0].startswith("preempt") else 1.0)
                say(kind="written")
            status = {"stop": 130, "preempt": 75}.get(told[0].partition(" ")[0], 1) if mode != "fail" else 1
            if mode == "fail":
                say(kind="error", text="the disk is full")
    for peer in server.peers:
        server.send(peer, Goodbye(""))
    end = monotonic() + 60
    while mode == "done" and monotonic() < end and any(server.send(peer, Goodbye("")) for peer in server.peers):
        server.receive(0.02)
    server.close()
    return status


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # the thread that reads stdin would block a normal exit

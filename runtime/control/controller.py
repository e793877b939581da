"""The single controller: `python -m penstock.runtime.control.controller RUN_FOLDER`, started by the launcher.

It owns the only clock and the only server socket. It starts ranks through agents, drives the stages of a run
(evaluate, train, save, evaluate) through the scheduler, and knows of every wait who is waited for and until when. It
never imports torch. Standard output carries one JSON object per line for the launcher; a line "stop" on standard
input asks for a checkpoint and the end.
"""

import json
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import Any

from penstock.graph.ir import Firing
from penstock.runtime.control.config import RunConfig
from penstock.runtime.control.messages import (
    AgentReady,
    Exited,
    Goodbye,
    Launch,
    Message,
    Note,
    Order,
    Ready,
    Results,
    Setup,
)
from penstock.runtime.control.stages import Stages
from penstock.runtime.control.wire import Server
from penstock.runtime.tensor.handle import Handle

TICK = 0.25
"""Seconds between two looks at deadlines, when nothing is heard."""


class PeerFault(RuntimeError):
    """A process of the run died, fell silent or broke the protocol. The message names it."""


class Controller:
    """The processes of a run. `stages` decides what they do; here they are started, heard, watched and dismissed."""

    def __init__(self, folder: Path, config: RunConfig, server: Server, stages: Stages) -> None:
        self.folder, self.config, self.server, self.stages = folder, config, server, stages
        self.ranks = {
            (replica.name, index): rank
            for replica in config.plan.replicas
            for index, rank in enumerate(replica.ranks)
        }
        self.hosts = {rank.host for rank in self.ranks.values()}
        self.agents: set[str] = set()
        self.ready: dict[tuple[str, int], int] = {}
        self.restored: dict[tuple[Firing, str], Handle] = {}
        self.gone: set[tuple[str, int]] = set()
        self.leaving = False
        self.stop = threading.Event()

    def run(self) -> str:
        """The run's status: "done", "stopped" or "failed"."""
        try:
            self._assemble()
            while self.stages.stage is None or self.stages.advance():
                if self.stages.stage is None:
                    self._send(self.stages.begin(self.restored, monotonic()))
                self._drive()
        except PeerFault as fault:
            self.stages.abort(str(fault), monotonic())
        finally:
            self._dismiss()
        return self.stages.status

    # Starting ---------------------------------------------------------------------------------------------

    def _assemble(self) -> None:
        """Agents, then ranks: each has `startup_deadline` seconds to appear, all at the same time."""
        until = monotonic() + self.config.flags.startup_deadline
        while self.agents < self.hosts or len(self.ready) < len(self.ranks):
            for peer, message in self.server.receive(TICK):
                self._meet(peer, message)
            if self.stop.is_set():
                raise PeerFault("stopped by the user before the run began")
            if monotonic() > until:
                raise PeerFault(self._absent())

    def _meet(self, peer: str, message: Message) -> None:
        match message:
            case AgentReady(host=host) if host in self.hosts and host not in self.agents:
                self.agents.add(host)
                for (replica, index), rank in self.ranks.items():
                    if rank.host == host:
                        self.server.send(peer, Launch(replica, index, rank.device, rank.threads))
            case Ready(replica=replica, rank=index, pid=pid, restored=restored):
                self.ready[replica, index] = pid
                self.restored.update(((f, output), handle) for f, output, handle in restored)
                self._write_processes()
            case _:
                self._hear(peer, message)

    def _absent(self) -> str:
        seconds = self.config.flags.startup_deadline
        if missing := sorted(self.hosts - self.agents):
            return f"no agent of host {', '.join(missing)} joined within {seconds:.0f} s at {self.server.endpoint}"
        names = ", ".join(f"{r} rank {i}" for r, i in self.ranks if (r, i) not in self.ready)
        return f"{names} did not get ready within {seconds:.0f} s; see {self.folder / 'logs'}"

    def _write_processes(self) -> None:
        pools: dict[str, list[int]] = {}
        for (replica, _), pid in self.ready.items():
            pools.setdefault(replica.rpartition("/")[0], []).append(pid)
        self.stages.folder.write_json("processes.json", {"controller": os.getpid(), "pools": pools})

    # Running ----------------------------------------------------------------------------------------------

    def _drive(self) -> None:
        """Until the stage has finished: hear, decide, send; look at deadlines now and then."""
        look = 0.0
        while self.stages.running:
            for peer, message in self.server.receive(TICK):
                self._hear(peer, message)
            now = monotonic()
            if now >= look:
                look = now + TICK
                self._watch(now)

    def _watch(self, now: float) -> None:
        late = self.server.late(now)
        if late:
            raise PeerFault(f"no heartbeat from {', '.join(late)}")
        if self.stop.is_set():
            self._send(self.stages.stop(now))
        self._send(self.stages.watch(now))

    def _hear(self, peer: str, message: Message) -> None:
        match message:
            case Results(results=results):
                for result in results:
                    self._send(self.stages.answer(result, monotonic()))
            case Note(level=level, text=text):
                self.stages.note(level, text)
            case Exited(replica=replica, rank=rank, reason=reason):
                self.gone.add((replica, rank))
                if not self.leaving:
                    raise PeerFault(f"{replica} rank {rank} died: {reason}")
            case _:
                self.stages.note("warning", f"{peer}: unexpected {type(message).__name__}")

    def _send(self, orders: Mapping[str, Order]) -> None:
        for replica, order in orders.items():
            for name, index in self.ranks:
                if name == replica and not self.server.send(f"{name}:{index}", order):
                    raise PeerFault(f"{name} rank {index} cannot be reached")

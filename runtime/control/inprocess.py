"""The whole run in one process and one thread: nodes are called directly, so that a debugger can step through them.

Scheduler, stages and executors are those of a run with processes; only the messages are missing.
"""

import os
import warnings
from collections import deque
from dataclasses import replace
from math import inf
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any

import torch

from penstock.graph.node import UntrustedError
from penstock.runtime.control.executor import Executor, be_deterministic
from penstock.runtime.control.failure import Failure, FailureCode
from penstock.runtime.control.messages import Order, Result, signal_name
from penstock.runtime.control.process import told
from penstock.runtime.control.rank_state import HeldValues, Key
from penstock.runtime.control.recorder import RunRecorder, Say, tell_node_warnings
from penstock.runtime.control.run import Session
from penstock.runtime.control.run_config import RunConfig
from penstock.runtime.control.signals import PREEMPTED, Preempted, StopRequest, interrupt, on_stop, output_fault
from penstock.runtime.control.weight_channels import LocalChannels
from penstock.runtime.record.checkpoints import UnreadableError, latest_checkpoint, sweep_checkpoints
from penstock.runtime.record.errors import RecordError
from penstock.runtime.record.folder import RunFolder


class InProcess:
    """One executor per rank, all in this thread. They share their values, so none is copied through shared memory."""

    def __init__(self, config: RunConfig, session: Session, folder: Path, restore: Path | None = None) -> None:
        if config.flags.deterministic:
            be_deterministic()
        self.session = session
        self.stop_request = StopRequest(handed_on=True)
        self._asked = False
        # One store for all: otherwise executors would need references to each other's values.
        self.values: dict[Key, Any] = {}
        peers: dict[str, LocalChannels] = {}
        self.executors: dict[str, Executor] = {}
        for device in {rank.device for replica in config.plan.replicas for rank in replica.ranks} - {"cpu"}:
            # At most one (`launching.require_processes`). Kernels and graphs run on the current device.
            torch.cuda.set_device(device)
        for replica in config.plan.replicas:
            (rank,) = replica.ranks  # a mesh needs processes
            setup = config.setup(replica, 0, folder, restore)
            channels = LocalChannels(
                config.channels(), replica.name, 0, rank.device, peers, config.flags.wire, config.kept_versions
            )
            self.executors[replica.name] = Executor(setup, channels, HeldValues(setup, self.values))

    def run(self) -> str:
        """Run all stages, and return the status."""
        pending: deque[tuple[Executor, Order]] = deque()
        self.session.begin(monotonic(), {})
        self._queue(pending)
        while self.session.running:
            for result in self._work(pending):
                self.session.answer(result, monotonic())
                self._queue(pending)
            if self.stop_request.status and not self._asked:
                self._asked, closed = True, output_fault(self.stop_request)
                if self.stop_request.status == PREEMPTED and not closed:
                    self.session.preempt(monotonic(), f"preempted ({signal_name(self.stop_request.number)})", inf)
                else:
                    self.session.stop(monotonic(), closed)
                self._queue(pending)
            self.session.watch(monotonic())
            self.session.decide(monotonic())
        return self.session.status

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. The first one asks for a checkpoint and the end, and never interrupts a node; a second one
        interrupts at once."""
        self.stop_request.hear(number)
        if self.stop_request.at_once:
            interrupt(number, frame)

    def _queue(self, pending: deque[tuple[Executor, Order]]) -> None:
        pending.extend((self.executors[replica], order) for replica, order in self.session.take().items())

    def _work(self, pending: deque[tuple[Executor, Order]]) -> list[Result]:
        """Carry out one order if there is one; otherwise do one step of every executor's streams."""
        if pending:
            executor, order = pending.popleft()
            _take_threads(executor)
            return [result for results in executor.carry_out(order) for result in results]
        results = []
        for executor in self.executors.values():
            _take_threads(executor)
            results += executor.step()
        # With one thread, nothing could ever answer what is still awaited.
        if not results and not any(executor.busy() for executor in self.executors.values()):
            awaited = self.session.stage.scheduler.answers if self.session.stage else {}
            raise RuntimeError(f"nothing is left to do, and still awaited: {awaited}")
        return results


def _take_threads(executor: Executor) -> None:
    """Use as many threads as the rank would have in its own process: the bits of a sum can depend on their number."""
    if torch.get_num_threads() != executor.threads:
        torch.set_num_threads(executor.threads)


def run_in_process(folder: RunFolder, say: Say) -> str:
    """Run or resume the run of a folder in this process, and return the status. `say` gets the lines for a display."""
    folder.sweep()
    sweep_checkpoints(folder)
    config, cut = RunConfig.load(folder), latest_checkpoint(folder)
    # No deadline: a breakpoint may take any time, and a single thread cannot notice that it hangs.
    config = replace(config, flags=replace(config.flags, deadline=inf))
    recorder = RunRecorder(folder, config, say, monotonic(), cut)
    session = Session(config, recorder, cut.cut if cut else None)
    try:
        with warnings.catch_warnings():
            tell_node_warnings(recorder.warn)
            driver = InProcess(config, session, folder.path, cut.folder if cut else None)
            folder.write_json("processes.json", {"controller": os.getpid(), "pools": {}})
            with on_stop(driver.interrupt):
                status = driver.run()
    except KeyboardInterrupt as interruption:
        who = "a cluster manager" if isinstance(interruption, Preempted) else "the user"
        text = f"stopped at once by {who}, without a checkpoint"
        session.fail(Failure(FailureCode.INTERRUPTED, text), monotonic())
        session.decide(monotonic())
        raise
    except RecordError:  # the folder cannot be written, so no summary either
        raise
    except UntrustedError as error:
        session.fail(Failure(FailureCode.UNTRUSTED, str(error)), monotonic())
        session.decide(monotonic())
        status = session.status
    except Exception as error:  # not a node's: that only fails its firing
        folder.require()
        code = FailureCode.CHECKPOINT if isinstance(error, UnreadableError) else FailureCode.CONTROLLER
        session.fail(Failure(code, told(error).rstrip()), monotonic())
        session.decide(monotonic())
        status = session.status
    finally:
        (folder.held / "processes.json").unlink(missing_ok=True)
        sweep_checkpoints(RunFolder(folder.held))
        folder.release()
    if session.failure is not None:
        say(session.failure.line())
    return status

"""One rank, forked by `python -m penstock.runtime.control.worker` for an agent, with its name in the environment.

The forking process may begin before there is a run, with `--early SOCKET MODULE…` (`early`).

A rank is one loop: take orders, carry them out, step the streams, answer.
"""

import json
import os
import sys
import traceback
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from penstock.graph.node import UntrustedError
from penstock.runtime.control.listener import WireError, raise_descriptors
from penstock.runtime.control.messages import (
    EXIT_EXPLAINED,
    Goodbye,
    Note,
    Order,
    Ready,
    Result,
    Results,
    Setup,
    Untrusted,
)
from penstock.runtime.control.process import RAISED, keep_freed_memory, serve_forks, told
from penstock.runtime.control.rendezvous import HeartbeatThread
from penstock.runtime.control.run_config import RunConfig
from penstock.runtime.control.security import Join
from penstock.runtime.control.signals import ignore_stop_signals
from penstock.runtime.control.sockets import Client
from penstock.runtime.record.checkpoints import UnreadableError

if TYPE_CHECKING:
    from penstock.runtime.control.rank import RankRuntime


# Seconds for which an answer may wait for the next command's, to travel with it.
HOLD = 0.001
# Bytes of samples in one message: less than `messages.MAX_BYTES`, and more than one sample has.
SAMPLES_BYTES = 1 << 20
# Seconds between two checks that the controller is alive, when there is nothing to do.
IDLE = 1.0

# The module that all ranks import. That is slow, mostly because of torch, so it is done once for all ranks of a host,
# together with the modules of the run's nodes (`RunConfig.modules`).
NEEDED = "penstock.runtime.control.rank"


def main() -> None:
    keep_freed_memory()
    raise_descriptors()
    join = Join.read(Path(os.environ["PENSTOCK_JOIN"]))
    join = replace(join, folder=os.environ["PENSTOCK_FOLDER"], endpoint=os.environ["PENSTOCK_ENDPOINT"])
    replica, index = os.environ["PENSTOCK_REPLICA"], int(os.environ["PENSTOCK_RANK"])
    pulse = HeartbeatThread(join, replica, index).start()
    client = Client(join, "rank", replica, index)
    status = 1
    try:
        status = serve(client, join, replica, index, pulse)
    except BaseException:
        traceback.print_exc()
    finally:
        pulse.stop()
        client.close()
        # Threads that a library leaves running (a link's) must not delay the end.
        sys.stderr.flush()
        os._exit(status)


def serve(client: Client, join: Join, replica: str, index: int, pulse: HeartbeatThread) -> int:
    """Set up this rank, work until goodbye, and return the exit status."""
    setup = await_setup(client)
    if setup is None:
        return 0
    name = f"{replica} rank {index}"
    try:
        from penstock.runtime.control.rank import RankRuntime  # torch

        config = RunConfig.from_json(json.loads(setup.config))
        name = config.plan.spelled(replica, index)
        life, start = (int(os.environ.get(name, "0")) for name in ("PENSTOCK_LIFE", "PENSTOCK_START"))
        rank = RankRuntime(config, replica, index, setup.restore, join, pulse, client.wake, life, start)
    except RAISED as error:
        traceback.print_exc()
        unreadable = isinstance(error, UnreadableError)
        # For an address or a port that cannot be had, the log has the traceback.
        why = str(error.strerror) if isinstance(error, WireError) else told(error)
        client.send(Note("error", f"{name} could not start:\n{why}", unreadable))
        return EXIT_EXPLAINED
    pulse.doing = lambda: str(rank.executor.doing)
    try:
        client.send(Ready(replica, index, os.getpid(), tuple(rank.executor.restored)))
        # Only now may the interval grow: the setup may hold the interpreter's lock for long.
        pulse.pace(sum(len(one.ranks) for one in config.plan.replicas))
        return work(client, rank)
    except UntrustedError as error:
        traceback.print_exc()
        return await_goodbye(client) if client.send(Untrusted(str(error))) else 1
    except RAISED as error:  # not a node's: that only fails its firing
        traceback.print_exc()
        at = f" at {rank.executor.doing}" if rank.executor.doing else ""
        client.send(Note("error", f"{name} failed{at}:\n{told(error)}"))
        return EXIT_EXPLAINED
    finally:
        rank.close()


def await_setup(client: Client) -> Setup | None:
    """Wait for the Setup; None if the run ends before it begins."""
    while not client.gone():
        for message in client.receive(IDLE):
            if isinstance(message, Setup):
                return message
            if isinstance(message, Goodbye):
                return None
    return None


def await_goodbye(client: Client) -> int:
    """Do nothing more until the controller says goodbye or is gone, and return the exit status. If the rank ended now,
    transfers of its peers would break, or a successor would be started."""
    while not client.gone():
        if any(isinstance(message, Goodbye) for message in client.receive(IDLE)):
            return 0
    return 1


def work(client: Client, rank: "RankRuntime") -> int:
    """Work until the controller says goodbye or is gone, and return the exit status."""
    executor, sent, waiting = rank.executor, monotonic(), deque[Order]()
    while True:
        results: list[Result] = []
        told = True
        # While there is work, only take the messages that are there; otherwise wait for some.
        for message in client.receive(0.0 if executor.busy() or waiting or rank.pace.busy else IDLE):
            if isinstance(message, Goodbye):
                return 0
            if isinstance(message, Order):
                waiting.append(message)
        for order in rank.pace.take(waiting, executor.busy()):
            for done in executor.carry_out(order):
                results += done
                if results and monotonic() - sent > HOLD:
                    told &= all(client.send(message) for message in in_messages(results))
                    results, sent = [], monotonic()
        results += executor.step()
        for text in rank.warnings():
            client.send(Note("warning", text))
        for unsent in rank.channels.unsent():
            told &= client.send(unsent)
        if results:
            told &= all(client.send(message) for message in in_messages(results))
        if not told:  # the controller would wait for lost answers
            return 1
        if results:
            sent = monotonic()
        elif client.gone():
            return 1


def in_messages(results: Iterable[Result]) -> Iterator[Results]:
    """Answers in few messages: with `--save-samples` those of one step may have more texts than one message takes."""
    together: list[Result] = []
    for result in results:
        if together and sum(len(one.sample) for one in (*together, result)) > SAMPLES_BYTES:
            yield Results(tuple(together))
            together = []
        together.append(result)
    yield Results(tuple(together))


if __name__ == "__main__":
    ignore_stop_signals()
    _, asks, *modules = sys.argv[1:] or ("", None)
    serve_forks(main, (NEEDED, *modules), None if asks is None else int(asks))
    # torch is slow to exit, and nothing is left to do.
    sys.stderr.flush()
    os._exit(0)

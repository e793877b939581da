"""The ranks of a host are forked from one process that has imported what each of them needs: torch takes seconds.

It is a child of the agent (see `ranks`), whose program ends in `serve_forks(main)`, with a socket for its stdin. For
each order there it forks twice. The process between ends at once, so that the rank becomes the agent's own child: the
agent waits for it, and the kernel ends it with the agent. What forks has one thread and has computed nothing, on no
device.
"""

import gc
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from time import sleep
from typing import NoReturn, TypedDict

from penstock.runtime.control.process import die_with_parent, take_name
from penstock.runtime.record.folder import open_append

PACKET_BYTES = 1 << 17
"""The most of an order."""


class Order(TypedDict):
    """A rank to be forked: its name, what its environment has beside the server's, and the files of its output."""

    name: str
    environment: Mapping[str, str]
    stdout: str
    stderr: str


def serve_forks(main: Callable[[], None], preload: Sequence[str] = ()) -> None:
    """Fork a process that calls `main` for each order of the agent at stdin, until it closes that."""
    die_with_parent()
    for module in preload:
        import_module(module)
    gc.collect()
    gc.freeze()  # or the first collection in each rank would write to, and so copy, every page
    with socket.socket(fileno=os.dup(0)) as door:
        while packet := door.recv(PACKET_BYTES):
            between = os.fork()
            if between == 0:
                _fork_again(door, json.loads(packet), main)
            if os.waitpid(between, 0)[1]:
                raise ChildProcessError("a rank could not be forked")  # the agent asks another process for it


def _fork_again(door: socket.socket, order: Order, main: Callable[[], None]) -> NoReturn:
    """In the process between: it makes the rank's, says its pid, whatever becomes of it, and ends."""
    between, status = os.getpid(), 1
    try:
        leads, leading = os.pipe()
        if rank := os.fork():
            os.close(leading)
            os.read(leads, 1)  # until it leads its session, by which it can be killed, or is dead
            _tell(door, order["name"], rank)
            os._exit(0)
        os.setsid()
        for descriptor in (leads, leading, door.detach()):
            os.close(descriptor)
        _become(order, between)
        main()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _tell(door: socket.socket, name: str, rank: int) -> None:
    try:
        door.send(json.dumps([name, rank]).encode())
    except OSError:  # nobody would know of it
        os.kill(rank, signal.SIGKILL)
        raise


def _become(order: Order, between: int) -> None:
    """Be the rank: a child of the agent, with its own output, environment and randomness."""
    while os.getppid() == between:  # which does nothing but end
        sleep(0.0005)
    die_with_parent()
    _become_file(0, os.open(os.devnull, os.O_RDONLY))
    _become_file(1, open_append(Path(order["stdout"])))
    _become_file(2, open_append(Path(order["stderr"])))
    os.environ.update(order["environment"])
    take_name(order["name"])
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # as in a process of its own; the standard library sees to itself


def _become_file(descriptor: int, opened: int) -> None:
    os.dup2(opened, descriptor)
    os.close(opened)

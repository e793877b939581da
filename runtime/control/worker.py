"""One rank: `python -m penstock.runtime.control.worker`, started by an agent with its name in the environment.

The heartbeat starts before torch is imported. Then one loop: take orders, carry them out, step the streams, answer.
"""

import os
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.runtime.control.heartbeat import Heart
from penstock.runtime.control.messages import Goodbye, Note, Order, Ready, Result, Results, Setup
from penstock.runtime.control.place import Place, place_from_environment
from penstock.runtime.control.wire import Client

if TYPE_CHECKING:
    from penstock.runtime.control.executor import Executor

IDLE = 1.0
"""Seconds between two looks at the controller's life, when there is nothing to do."""


def work(client: Client, executor: "Executor") -> None:
    """Serve until the controller says goodbye or is gone."""
    while True:
        results: list[Result] = []
        for message in client.receive(0.0 if executor.busy() else IDLE):
            if isinstance(message, Goodbye):
                return
            if isinstance(message, Order):
                results += executor.carry_out(message)
        results += executor.step()
        if results:
            client.send(Results(tuple(results)))

"""What forks a host's ranks may do so: see `test_agent.py` for the ranks."""

import json
import os
import subprocess
import sys

from penstock.runtime.control.agent import ALONE
from penstock.runtime.control.worker import NEEDED

MODULES = ("penstock.nodes.policy", "penstock.nodes.generate", "penstock.nodes.learn.update", "penstock.nodes.score")

SCRIPT = """
import importlib, json, os, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
import torch
print(json.dumps({"threads": len(os.listdir("/proc/self/task")), "cuda": torch.cuda.is_initialized()}))
"""


def test_what_ranks_need_starts_no_thread_and_touches_no_device_when_it_is_imported() -> None:
    command, environment = [sys.executable, "-c", SCRIPT, NEEDED, *MODULES], {**os.environ, **ALONE}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, timeout=120)
    assert json.loads(done.stdout) == {"threads": 1, "cuda": False}

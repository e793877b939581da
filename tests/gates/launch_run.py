"""Launch a run in processes: python launch_run.py FOLDER RUN [GRACE]. Prints the launcher's lines, and ends with its
exit status. GRACE is the launcher's grace if it differs from the run's."""

import gc
import json
import sys
from typing import Any

from penstock.runtime.cluster.cluster import Cluster
from penstock.runtime.control.launcher import Launcher
from penstock.runtime.control.run_config import RunConfig
from penstock.runtime.record.folder import RunFolder


def tell(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    folder = RunFolder.open(sys.argv[1])
    folder.lock()
    config = RunConfig.load(folder)
    cluster = Cluster.model_validate(folder.read_json("config.json")["asked"]["cluster"])
    grace = float(sys.argv[3]) if sys.argv[3:] else config.flags.grace
    launcher = Launcher(folder.path, sys.argv[2], cluster, tell, grace=grace, modules=config.modules())
    gc.freeze()  # to look for garbage among imported modules would be a tenth of this process's work
    sys.exit(launcher.run())

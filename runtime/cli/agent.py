"""`penstock agent JOIN_FILE`: start this machine's part of a run that another machine controls."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from penstock.runtime.cli.flags import read_flags
from penstock.runtime.control.agent import serve

DESCRIPTION = """Join the controller of a run on another machine, and start the processes it asks for here.

`penstock run … --cluster FILE` with a host whose agent is "external" writes a join file for that host into
RUN/keys, readable by you only, and waits. Take it there over a channel you trust (scp), and start the agent: by hand,
or as srun, a container or a batch job would. Weights travel unencrypted: the hosts need a trusted network.
docs/cluster-file.md has a cluster file of two hosts, and all of its keys.

Example:
  penstock agent b.json --folder /scratch/run"""


@dataclass(frozen=True)
class AgentFlags:
    """Flags of agent"""

    join: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="JOIN_FILE")]
    """The join file of this host: where the controller is, and the keys."""
    folder: Annotated[
        str, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: as on the controller's host)")
    ] = ""
    """The run folder as this machine sees it, or one of its own, made if it is not there, for logs and its part of
    checkpoints."""


def main(argv: Sequence[str]) -> int:
    flags = read_flags(AgentFlags, "agent", argv, DESCRIPTION)
    return serve(Path(flags.join), Path(flags.folder) if flags.folder else None)

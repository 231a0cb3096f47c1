"""examples/train_gpt.py on two tiers, with a pause in each step.

::

    python -m mpi4py train_in_tiers.py LOCAL COPIES EVERY SLOW PAUSE_S [of train_gpt...]

LOCAL is the run directory on the disk of each node, and each shard has COPIES copies
there. One in EVERY checkpoints goes on to the run directory of train_gpt, in the first
start of a job at SLOW bytes a second; 0 is no limit.
"""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from mpickpt import CheckpointManager, DirectoryTier, LocalTier
from tests.slurm.programs.train_at_pace import train_gpt_at_pace


def main() -> int:
    local, copies, every, slow, pause_s = sys.argv[1:6]
    del sys.argv[1:6]
    train_gpt = train_gpt_at_pace(float(pause_s))
    nearest = LocalTier(local, keep=2, copies=int(copies))
    is_first = os.environ.get("SLURM_RESTART_COUNT", "0") == "0"
    pace = {"every": int(every), "bandwidth": (is_first and float(slow)) or None}
    train_gpt.CheckpointManager = partial(manager_of, nearest, pace)
    status = train_gpt.main()
    train_gpt.MPI.Finalize()
    return status


def manager_of(
    nearest: LocalTier, pace: dict[str, Any], run: Path, comm: Any, **options: Any
) -> CheckpointManager:
    """Return the manager that train_gpt asks for, but with one more tier before."""
    shared = DirectoryTier(run, keep=options.pop("keep"), **pace)
    return CheckpointManager(None, comm, tiers=[nearest, shared], **options)


if __name__ == "__main__":
    sys.exit(main())

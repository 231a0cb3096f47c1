"""examples/train_gpt.py, with a pause in each step and, if asked, one save that hangs.

::

    python -m mpi4py train_at_pace.py PAUSE_S HANGING_STEP [option of train_gpt...]

The save of HANGING_STEP (none: -1) hangs on rank 2 while it makes its shard durable.
"""

import importlib.util
import os
import sys
import time
from pathlib import Path
from types import ModuleType

from mpickpt.format.naming import step_directory_name

HANG_S = 120.0
EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "train_gpt.py"


def main() -> int:
    pause_s, hanging_step = float(sys.argv[1]), int(sys.argv[2])
    del sys.argv[1:3]
    train_gpt = train_gpt_at_pace(pause_s)
    if hanging_step >= 0 and train_gpt.MPI.COMM_WORLD.rank == 2:
        hang_in_fsync(step_directory_name(hanging_step))
    status = train_gpt.main()
    train_gpt.MPI.Finalize()
    return status


def train_gpt_at_pace(pause_s: float) -> ModuleType:
    """Return the example's module, with a pause in each step."""
    specification = importlib.util.spec_from_file_location("train_gpt", EXAMPLE)
    train_gpt = importlib.util.module_from_spec(specification)
    sys.modules["train_gpt"] = train_gpt
    specification.loader.exec_module(train_gpt)
    gradient = train_gpt.Training.gradient

    def gradient_at_pace(job):
        time.sleep(pause_s)
        return gradient(job)

    train_gpt.Training.gradient = gradient_at_pace
    return train_gpt


def hang_in_fsync(directory_name: str) -> None:
    fsync = os.fsync  # noqa: TID251 - it stands for the disk

    def hanging_fsync(descriptor: int) -> None:
        if directory_name in os.readlink(f"/proc/self/fd/{descriptor}"):
            time.sleep(HANG_S)
        fsync(descriptor)

    os.fsync = hanging_fsync  # noqa: TID251


if __name__ == "__main__":
    sys.exit(main())

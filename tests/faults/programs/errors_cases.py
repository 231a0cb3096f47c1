"""What the errors suite asks of every save that failed, and how it gets in."""

import json
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from mpickpt.parallel import ground, pending, save, save_steps
from mpickpt.parallel.local_work import LocalWork
from mpickpt.storage.lease import Lease
from tests.crash.programs.outcomes import attempt
from tests.crash.small_state import files_of
from tests.faults.errors_rubbish import rubbish_in
from tests.faults.programs.errors_modes import COMM, AtOnce, load

Said = dict[str, Any]

MARK = "/moment-of-the-errors-suite"


class Moments:
    """Does something in the thread that comes to a moment of a save.

    The moments: "work", when the thread begins that writes this rank's shard; "write",
    when it comes to that; "beat", when that of the lease begins; and, on rank 0 alone,
    "prepared", when the directory was made, and "publish", when all is written.
    """

    def __init__(self) -> None:
        self._at: str | None = None
        self._act: Callable[[], None] = lambda: None
        self._tell(LocalWork, "_run", "work")
        self._tell(Lease, "_beat", "beat")  # whose calls come when they come
        self._tell(save, "write_shard_file", "write")
        self._tell(pending, "write_staged_file", "write")
        self._tell(save_steps.Save, "manifest", "publish")
        self._tell(ground, "make_room", "prepared", after=True)

    def at(self, moment: str | None, act: Callable[[], None] = lambda: None) -> None:
        """Act when the moment comes, every time; at no moment for None."""
        self._at, self._act = moment, act

    def _tell(self, owner: Any, name: str, moment: str, after: bool = False) -> None:
        call = getattr(owner, name)

        def tell_and_call(*arguments: Any, **options: Any) -> Any:
            if not after:
                self._come(moment)
            answer = call(*arguments, **options)
            if after:
                self._come(moment)
            return answer

        setattr(owner, name, tell_and_call)

    def _come(self, moment: str) -> None:
        os.access(f"{MARK}/{moment}", os.F_OK)  # for the recording
        if self._at == moment:
            self._act()


def run_case(
    mode: AtOnce,
    run: Path,
    fault: AbstractContextManager[list[str]],
    mend: Callable[[], None] = lambda: None,
) -> Said:
    """Save under the fault; tell how that went, and all that came after.

    Parameters
    ----------
    mode, run
        What is saved, and where.
    fault : context manager
        Is there while it is entered; gives what shows that it was.
    mend : callable
        Makes the disk good again; called once it is known what loads from it.
    """
    mode.begin(run)
    COMM.barrier()
    before = _in_steps(run)
    COMM.barrier()
    with fault as hits:
        COMM.barrier()
        said = attempt(mode.save)
        COMM.barrier()
    said["left"] = sorted(_in_steps(run) - before) if COMM.rank == 0 else []
    COMM.barrier()
    said["old"] = attempt(load, run, mode.old[0])
    said["new"] = attempt(load, run, mode.new[0])
    COMM.barrier()
    mend()
    COMM.barrier()
    said["again"] = attempt(mode.again)
    said["last"] = attempt(load, run, mode.last[0])
    said["end"] = attempt(mode.end)
    said["hits"] = hits
    said["threads"] = threading.active_count()
    COMM.barrier()
    if COMM.rank == 0:
        said["rubbish"] = rubbish_in(run)
    return said


def say(folder: Path, line: Said) -> None:
    """Append to what the suite reads; on rank 0."""
    if COMM.rank == 0:
        with (folder / "said").open("a") as file:
            file.write(json.dumps(line) + "\n")


def _in_steps(run: Path) -> set[str]:
    return {path for path in files_of(run) if path.startswith("step-")}

"""Keeps the file by which a run is asked to stop; one process, files only, no MPI."""

from datetime import UTC, datetime
from pathlib import Path

from mpickpt.format.naming import HALT_PATH
from mpickpt.storage.catalog import PathLike
from mpickpt.storage.small_file import (
    document_of,
    is_in_run,
    is_there,
    remove_control_file,
    replace_document,
)


class HaltFile:
    """The halt file of one run.

    Parameters
    ----------
    run_dir : path-like
        The run directory; it need not exist.

    Notes
    -----
    Not collective, needs no MPI. Every change is durable when its call returns. Any
    process may make them.
    """

    def __init__(self, run_dir: PathLike) -> None:
        self.path = Path(run_dir) / HALT_PATH

    def write(self, reason: str = "") -> None:
        """Ask the run to save once more and stop."""
        at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        replace_document(self.path, {"reason": reason, "at": at})

    def remove(self) -> None:
        """Let the run go on when it starts again."""
        remove_control_file(self.path)

    @property
    def exists(self) -> bool:
        """Whether the run was asked to stop; costs a stat and a listing."""
        return is_in_run(self.path.parent) and is_there(self.path)

    @property
    def reason(self) -> str | None:
        """Why the run was asked to stop; None where it was not."""
        if not self.exists:
            return None
        return str((document_of(self.path) or {}).get("reason", ""))

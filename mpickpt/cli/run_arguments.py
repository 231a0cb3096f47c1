"""What the commands that change a run have in common; no MPI."""

import argparse
import contextlib
from collections.abc import Iterator

from mpickpt.cli.output import print_warning
from mpickpt.cli.place_arguments import add_run_argument, count, whole_number
from mpickpt.cli.status import UsageError
from mpickpt.errors import CheckpointNotFoundError
from mpickpt.storage.lease import Lease
from mpickpt.storage.places import Place, absolute, is_directory, is_there
from mpickpt.storage.remote_path import RemotePath
from mpickpt.storage.run_directory import RunDirectory

__all__ = [
    "NoLease",
    "add_run_argument",
    "count",
    "existing_run",
    "require_run",
    "step",
    "writing_in",
]


def existing_run(options: argparse.Namespace) -> RunDirectory:
    """Return the run directory; a mistyped one is an error, not made.

    Raises
    ------
    UsageError
        If it is in a store: what says something about a run is kept in files.
    """
    run_dir = options.run_dir
    if isinstance(run_dir, RemotePath):
        raise UsageError(
            f"{run_dir} is in a store, which keeps checkpoints alone: no pins, no "
            "metrics that came later, no halt file; name the run directory of the job"
        )
    require_run(run_dir)
    return RunDirectory(run_dir)


def require_run(run_dir: Place) -> None:
    """Raise unless there is a run; one in a store may hold anything."""
    if not (is_there(run_dir) and is_directory(run_dir)):
        raise CheckpointNotFoundError(f"no run directory at {absolute(run_dir)}")


class NoLease:
    """Stands where a store has nothing that a writer could hold."""

    def require(self) -> None:
        """Do nothing."""


@contextlib.contextmanager
def writing_in(run_dir: Place) -> Iterator[Lease | NoLease]:
    """Hold the lease of a run while something is removed from it.

    A store has none: a warning says so.

    Raises
    ------
    LeaseHeldError
        If a job writes in the run.
    """
    if isinstance(run_dir, RemotePath):
        print_warning(
            f"{run_dir} is in a store, which has no lease: nobody is kept from copying "
            "to it, or reading from it, what is being removed"
        )
        yield NoLease()
        return
    with Lease.acquire(run_dir) as lease:
        yield lease


def step(text: str) -> int:
    """Return the step that an argument says, from 0."""
    return whole_number(text, least=0)

"""Keeps the rules of a further tier: removes there what none of them keeps; no MPI."""

import logging

from mpickpt.errors import StorageError
from mpickpt.planning.retention import KeepPolicy, plan_retention
from mpickpt.storage.places import Place
from mpickpt.storage.remote_path import RemotePath
from mpickpt.storage.remote_run import run_at
from mpickpt.storage.removal import remove_checkpoint
from mpickpt.storage.run_directory import RunDirectory
from mpickpt.storage.run_entry import retention_candidates

log = logging.getLogger(__name__)


def remove_surplus(run: Place, keep: KeepPolicy, good: set[int]) -> None:
    """Remove the checkpoints of a tier that no rule keeps.

    Parameters
    ----------
    run : Path or RemotePath
        The run in that tier.
    keep : KeepPolicy
        Its rules.
    good : set of int
        Steps that are known to be whole there.

    Notes
    -----
    What cannot be removed is a warning: the copy that was just published is safe.
    """
    try:
        entries = {entry.step: entry for entry in run_at(run).candidates()}
        for verdict in plan_retention(
            retention_candidates(entries.values(), good), keep
        ):
            if not verdict.keep:
                log.info(
                    "removing step %d of %s: %s", verdict.step, run, verdict.reason
                )
                remove_checkpoint(entries[verdict.step].path)
    except StorageError as error:
        log.warning("cannot remove old checkpoints of %s: %s", run, error)


def set_aside_after(run: Place, step: int) -> None:
    """Take away the steps of a tier that a run has gone back from.

    Parameters
    ----------
    run : Path or RemotePath
        The run in that tier.
    step : int
        What the run goes on from: later steps are of a past that is given up.

    Raises
    ------
    StorageError
        If the tier refuses.

    Notes
    -----
    In a directory they are renamed, as in the first tier. A store cannot rename; there
    they are removed, else the next restore would take them for the newest.
    """
    for entry in run_at(run).candidates():
        if entry.step <= step:
            continue
        log.warning("the run went back to step %d: %s goes", step, entry.path)
        if isinstance(run, RemotePath):
            remove_checkpoint(entry.path)
        else:
            RunDirectory(run).reject(entry.step, f"the run went back to step {step}")

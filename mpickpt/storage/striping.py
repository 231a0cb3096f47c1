"""Has the shards of a save striped as was asked for, before there are any; files only.

Whatever is refused, or does not take, is said once for each run directory, and the save
goes on: it is worth more than its layout.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

from mpickpt.format.naming import parse_step_directory
from mpickpt.planning.file_systems import FileSystem
from mpickpt.planning.stripe_layout import StripeLayout
from mpickpt.planning.striping import complaint_about, plan_striping
from mpickpt.planning.striping_wish import (
    ProgressiveStriping,
    Striping,
    Wish,
    difference,
)
from mpickpt.storage.lustre import OstSpace, apply, inherited_layout, osts

log = logging.getLogger(__name__)

_told: set[tuple[Path, str]] = set()
_n_osts: dict[str, int] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Striped:
    """How the shards of a save are going to be striped.

    Attributes
    ----------
    layout : StripeLayout or None
        The layout that they get; None where there is none, or nothing tells.
    notes : tuple of str
        What a user should know of it.
    """

    layout: StripeLayout | None = None
    notes: tuple[str, ...] = ()


def stripe(
    directory: Path,
    file_system: FileSystem,
    wish: Wish,
    *,
    shard_nbytes: int,
    n_ranks: int,
) -> Striped:
    """Have new files of a directory striped, and say how they will be.

    Parameters
    ----------
    directory : Path
        Of the checkpoint, without shards or directories for them.
    file_system : FileSystem
        The one that it lies on.
    wish : {"site", "auto"}, Striping or ProgressiveStriping
        "site" changes nothing and warns of what is bad for one file per rank; "auto"
        sets what `plan_striping` says.
    shard_nbytes : int
        Bytes of the largest shard, about.
    n_ranks : int
        Number of shards.

    Notes
    -----
    For one process. Never fails. Without Lustre it does nothing; on Lustre it starts
    `lfs`, but for "site" with a layout that is not composite.
    """
    if file_system.kind != "lustre":
        return _without_stripes(directory, file_system, wish)
    if wish == "site":
        return _as_it_is(directory, shard_nbytes, n_ranks)
    if wish == "auto":
        n_osts = _number_of_osts(directory, file_system)
        wish = plan_striping(shard_nbytes, n_ranks, n_osts)
    return _as_wanted(directory, wish)


def targets_of(
    directory: Path, file_system: FileSystem, striped: Striped
) -> tuple[OstSpace, ...] | None:
    """Return the storage targets that shards can go to, None where nothing tells."""
    if file_system.kind != "lustre" or striped.layout is None:
        return None
    return osts(directory, striped.layout.pool or None) or None


def _without_stripes(directory: Path, file_system: FileSystem, wish: Wish) -> Striped:
    if wish in ("site", "auto"):
        return Striped()
    note = f"striping ({wish}) is for Lustre, and this is {file_system}: nothing is set"
    _warn_once(directory, "no Lustre", note)
    return Striped(notes=(note,))


def _as_it_is(directory: Path, shard_nbytes: int, n_ranks: int) -> Striped:
    layout = inherited_layout(directory)
    complaint = layout and complaint_about(
        layout, shard_nbytes=shard_nbytes, n_ranks=n_ranks, n_osts=None
    )
    if not complaint:
        return Striped(layout=layout)
    note = (
        f"{complaint}; ask for striping='auto' (MPICKPT_STRIPING=auto), or set another "
        f"layout on the run directory: lfs setstripe -c 1 -S 4M {_run_of(directory)}"
    )
    _warn_once(directory, "bad layout", note)
    return Striped(layout=layout, notes=(note,))


def _as_wanted(directory: Path, wanted: Striping | ProgressiveStriping) -> Striped:
    layout = inherited_layout(directory)
    if difference(layout, wanted) is None:
        return Striped(layout=layout)
    refusal = apply(directory, wanted)
    layout = inherited_layout(directory)
    other = difference(layout, wanted)
    if other is None:
        because = f" ({wanted.reason})" if wanted.reason else ""
        _say_once(directory, "striped", f"shards are striped: {wanted}{because}")
        return Striped(layout=layout)
    note = (
        f"shards cannot be striped as wanted ({wanted}): {refusal or 'it did not take'}"
        f"; {other}, and the save goes on with it"
    )
    _warn_once(directory, "not striped", note)
    return Striped(layout=layout, notes=(note,))


def _number_of_osts(directory: Path, file_system: FileSystem) -> int | None:
    """Return how many storage targets there are, asked once for a file system."""
    key = file_system.point or str(directory)
    if key not in _n_osts:
        found = len(osts(directory))
        if not found:
            return None
        _n_osts[key] = found
    return _n_osts[key]


def _warn_once(directory: Path, subject: str, note: str) -> None:
    _say_once(directory, subject, note, level=logging.WARNING)


def _say_once(
    directory: Path, subject: str, note: str, level: int = logging.INFO
) -> None:
    run = _run_of(directory)
    if (run, subject) not in _told:
        _told.add((run, subject))
        log.log(level, "%s: %s", run, note)


def _run_of(directory: Path) -> Path:
    """Return the run directory of a checkpoint, or itself if it is in none."""
    is_step = parse_step_directory(directory.name) is not None
    return directory.parent if is_step else directory

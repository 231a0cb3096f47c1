"""The arguments of one save."""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpickpt.errors import CollectiveTimeoutError, StorageError
from mpickpt.format.naming import parse_step_directory
from mpickpt.parallel.communicators import Conversations, conversations_of
from mpickpt.parallel.launcher import check_launcher
from mpickpt.parallel.options import SaveOptions
from mpickpt.storage.places import local_path

if TYPE_CHECKING:
    from mpickpt.parallel.ground import Ground

_NO_STORE = (
    "a save writes files; save to a directory, and have it copied by "
    "CheckpointManager(tiers=[...]) or mpickpt cp"
)


def _let_pass() -> None:
    pass


def _leave_it(_nbytes: int) -> None:
    pass


_KNOWN_OPTIONS = SaveOptions(direct_io="auto", striping="site")


def place_and_options(
    path: Any, options: Any
) -> tuple[Path, SaveOptions, Exception | None]:
    """Return the directory and the options of a save, and what is wrong with them.

    What is wrong on one rank is not raised here, where the others would wait for it,
    but by `SaveCall.check`, on all ranks.
    """
    try:
        if options is None:
            options = SaveOptions()
        elif not isinstance(options, SaveOptions):
            raise TypeError(
                f"options is a {type(options).__name__}; expected SaveOptions or None"
            )
        directory = local_path(path, _NO_STORE)
        return Path(os.path.abspath(directory)), options, None
    except (TypeError, ValueError, StorageError) as error:
        return Path(os.sep), _KNOWN_OPTIONS, error


def conversations_of_save(comm: Any, options: SaveOptions) -> Conversations:
    """Return the conversations of a communicator, for a save that begins."""
    with nothing_published():
        return conversations_of(comm, options.timeout_s)


@contextlib.contextmanager
def nothing_published() -> Iterator[None]:
    """Say in a time-out that the save that was asked for had not begun."""
    try:
        yield
    except CollectiveTimeoutError as error:
        error.outcome = error.outcome or "unpublished"
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCall:
    """The arguments of one save.

    Attributes
    ----------
    state : callable
        Returns the state tree.
    step, metadata, metrics, overwrite, options
        As in `save_sharded`.
    directory : Path
        Of the checkpoint, absolute.
    comm : mpi4py.MPI.Intracomm or None
        As in `save_sharded`; looked at for launchers that split a job.
    run : mapping
        JSON of the run, for the manifest.
    ran_before_s : float
        Run time before this process was started, in seconds.
    before_publish : callable
        Called before the manifest is published by the rank that does it: rank 0, or
        the lowest of each node; may raise.
    make_space : callable of int
        Called by the same ranks with the bytes to come, before the space is checked.
    unusable : Exception or None
        What is wrong with the arguments, found when the call was made.
    ground : Ground or None
        Where to write, of this save alone; None is `directory`, which all ranks see.
    run_name : Path or None
        What all ranks call the run; None is the parent of `directory`.
    """

    state: Callable[[], Any]
    directory: Path
    step: int
    metadata: dict[str, Any] | None
    metrics: dict[str, Any] | None
    overwrite: bool
    options: SaveOptions
    comm: Any = None
    run: Mapping[str, Any] = field(default_factory=dict)
    ran_before_s: float = 0.0
    before_publish: Callable[[], None] = _let_pass
    make_space: Callable[[int], None] = _leave_it
    unusable: Exception | None = None
    ground: "Ground | None" = None
    run_name: Path | None = None

    @property
    def run_key(self) -> Path:
        """By what saves remember what they know of a run; alike on all ranks."""
        return self.directory.parent if self.run_name is None else self.run_name

    def check(self) -> None:
        """Raise unless the arguments are of the right kind."""
        if self.unusable is not None:
            raise self.unusable
        if isinstance(self.step, bool) or not isinstance(self.step, int):
            raise TypeError(f"step is a {type(self.step).__name__}; expected an int")
        if not 0 <= self.step < 2**63:
            raise ValueError(f"step is {self.step}; expected 0 or more, below 2**63")
        for name in ("metadata", "metrics"):
            _require_json(name, getattr(self, name))

    def run_time_s(self) -> float:
        """Return the seconds that the run has taken so far, over all its starts."""
        return self.ran_before_s + seconds_since_start()

    def check_launcher(self) -> None:
        """Raise if other processes that believe to be rank 0 save here too.

        Claims lie in the run directory's ``.mpickpt`` where the path is that of a step,
        else in the checkpoint's own. Called twice: the first may come too early to see.
        """
        is_step = parse_step_directory(self.directory.name) is not None
        claims = self.directory.parent if is_step else self.directory
        check_launcher(self.comm, claims)


def _require_json(name: str, value: Any) -> None:
    if value is not None and not isinstance(value, dict):
        raise TypeError(f"{name} is a {type(value).__name__}; expected a dict or None")
    try:
        json.dumps(value, allow_nan=False, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"{name} cannot be written as JSON: {error}; give a dict of str keys with "
            "None, bool, int, finite float, str, lists and dicts"
        ) from error


def seconds_since_start() -> float:
    """Return the seconds since this process was started."""
    with open("/proc/self/stat", "rb") as stat:
        # Field 22, counted after the name in parentheses, which may hold spaces: the
        # start in clock ticks since boot (proc(5)).
        ticks = int(stat.read().rpartition(b")")[2].split()[19])
    started = ticks / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)

"""`mpickpt flush RUN --to DST`: copy the checkpoints of a run that DST does not have.

For the end of a batch script, on each node whose disk holds shards of its own:
``srun --ntasks-per-node=1 mpickpt flush ...``. Whoever sees all shards publishes.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpickpt.cli.copy_options import add_copy_arguments, copy_progress, pace_of
from mpickpt.cli.output import nbytes_text, print_json, print_line
from mpickpt.cli.place_arguments import count, place
from mpickpt.cli.status import (
    DAMAGED,
    FAILED,
    UNFINISHED,
    UNREADABLE,
    WHOLE,
    status_of,
)
from mpickpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    IncompleteCheckpointError,
)
from mpickpt.format.naming import step_directory_name
from mpickpt.format.records import ShardManifest
from mpickpt.planning.units import parse_seconds
from mpickpt.storage.catalog import checkpoints, read_manifest
from mpickpt.storage.copy_publishing import ranks_text
from mpickpt.storage.copy_sweep import last_change, sweep_copies
from mpickpt.storage.copy_target import CopyControl, files_of
from mpickpt.storage.copying import (
    copy_shards,
    is_published,
    missing_ranks,
    own_ranks,
    publish_copy,
    ranks_in,
)
from mpickpt.storage.node_disk import NODE_FIELD, own_directory
from mpickpt.storage.places import Place

_WAIT_S = 120.0
_LOOK_S = 0.5
_LONGEST_LOOK_S = 5.0
_OTHER = "published by another"
_WORST_FIRST = (DAMAGED, UNREADABLE, FAILED, UNFINISHED)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument(
        "run_dir",
        metavar="RUN",
        type=_own_run,
        help="run whose checkpoints are copied; {node} is this node's name, as in a "
        "LocalTier",
    )
    parser.add_argument(
        "--to",
        metavar="DST",
        type=place,
        action="append",
        required=True,
        help="run directory or URL that gets them; may be given several times",
    )
    parser.add_argument(
        "--last", metavar="N", type=count, help="the newest N alone; by default all"
    )
    parser.add_argument(
        "--wait",
        metavar="TIME",
        type=_seconds,
        default=_WAIT_S,
        help="how long to wait for shards of other nodes while none of them comes, by "
        f"default {_WAIT_S:.0f}s",
    )
    add_copy_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _own_run(text: str) -> Place:
    return own_directory(text) if NODE_FIELD in text else place(text)


def run(options: argparse.Namespace) -> int:
    """Copy the newest first; the exit status tells whether anything is left to do."""
    flushed = list(_each(options))
    for one in flushed:
        _copy(one, options)
        if not options.json and one.is_ended:
            print_line(one.text)
    _wait_for_others(flushed, options)
    for to in options.to:
        sweep_copies(to)
    if options.json:
        print_json([one.described() for one in flushed])
    elif not flushed:
        print_line(f"nothing to copy in {options.run_dir}")
    found = {one.status for one in flushed}
    return next((code for code in _WORST_FIRST if code in found), WHOLE)


@dataclass(slots=True, kw_only=True)
class _Flushed:
    """One checkpoint and one place that is to get it, and what became of it."""

    source: Place
    target: Place
    step: int
    manifest: ShardManifest | None = None
    missing: tuple[int, ...] = ()
    outcome: str = "left"
    problem: str | None = None
    status: int = UNFINISHED

    @property
    def is_ended(self) -> bool:
        return self.outcome != "left"

    @property
    def text(self) -> str:
        problem = "" if self.problem is None else f": {self.problem}"
        return f"{self.target}: {self.outcome}{problem}"

    def end(self, outcome: str) -> None:
        """Note that nothing is left to do for it."""
        self.outcome, self.status, self.problem = outcome, WHOLE, None

    def fail(self, error: CheckpointError) -> None:
        """Note why it cannot be done."""
        if isinstance(error, CheckpointNotFoundError):
            self.end("removed meanwhile")
            return
        self.outcome, self.problem = "failed", str(error)
        self.status = status_of(error)

    def described(self) -> dict[str, Any]:
        """Return it for a script."""
        return {
            "step": self.step,
            "source": str(self.source),
            "target": str(self.target),
            "outcome": self.outcome,
            "problem": self.problem,
            "status": self.status,
        }


def _each(options: argparse.Namespace) -> Iterator[_Flushed]:
    entries = checkpoints(options.run_dir)[::-1]
    if not entries and isinstance(options.run_dir, Path):
        _require_directory(options.run_dir)
    for entry in entries[: options.last]:
        for to in options.to:
            target = to / step_directory_name(entry.step)
            yield _Flushed(source=entry.path, target=target, step=entry.step)


def _require_directory(run_dir: Path) -> None:
    if not run_dir.is_dir():
        raise CheckpointNotFoundError(f"no run directory at {run_dir.absolute()}")


def _copy(one: _Flushed, options: argparse.Namespace) -> None:
    """Copy the shards that are this node's; publish if none is missing then."""
    try:
        manifest = one.manifest = read_manifest(one.source)
        if is_published(one.target, manifest):
            publish_copy(one.target, manifest)
            one.end("there already")
            return
        here = ranks_in(one.source, manifest)
        moved = _copy_ranks(one, manifest, own_ranks(manifest, here), options)
        _publish(one, moved)
    except CheckpointError as error:
        one.fail(error)


def _copy_ranks(
    one: _Flushed,
    manifest: ShardManifest,
    ranks: Sequence[int],
    options: argparse.Namespace,
) -> int:
    total = sum(record.nbytes for record in files_of(manifest, ranks))
    with copy_progress(str(one.target), total) as progress:
        control = CopyControl(pace=pace_of(options), progress=progress)
        return copy_shards(
            manifest, one.source, one.target, ranks, control=control, jobs=options.jobs
        )


def _copy_for_others(one: _Flushed, options: argparse.Namespace) -> None:
    """Copy what does not come from its own node, as far as copies of it are here."""
    if one.manifest is None:
        return
    here = set(ranks_in(one.source, one.manifest))
    ranks = [rank for rank in one.missing if rank in here]
    if ranks:
        _publish(one, _copy_ranks(one, one.manifest, ranks, options))


def _publish(one: _Flushed, moved: int = 0) -> None:
    """Publish a copy if all is there, or see that another node has."""
    assert one.manifest is not None
    missing = one.missing = tuple(missing_ranks(one.target, one.manifest))
    if missing:
        one.problem = f"the shards of {ranks_text(missing)} are not there yet"
        return
    try:
        is_ours = publish_copy(one.target, one.manifest)
    except IncompleteCheckpointError as error:
        one.problem = str(error)  # removed since; the source is not damaged
        return
    one.end(f"published, {nbytes_text(moved)} copied from here" if is_ours else _OTHER)


def _wait_for_others(flushed: list[_Flushed], options: argparse.Namespace) -> None:
    """Look again until all are published, or nothing has come for too long."""
    pause_s, seen, seen_at_s = _LOOK_S, None, time.monotonic()
    has_helped = False
    while left := [one for one in flushed if not one.is_ended]:
        found = [(one.missing, last_change(one.target)) for one in left]
        if found != seen:
            seen, pause_s, seen_at_s = found, _LOOK_S, time.monotonic()
        waited_s = time.monotonic() - seen_at_s
        if has_helped and waited_s >= options.wait:
            break
        helps = not has_helped and waited_s >= options.wait / 4
        has_helped = has_helped or helps
        if not helps:
            time.sleep(min(pause_s, options.wait / 4))
            pause_s = min(2 * pause_s, _LONGEST_LOOK_S)
        for one in left:
            _go_on(one, options, helps=helps)
    if not options.json:
        for one in left:
            print_line(one.text)


def _go_on(one: _Flushed, options: argparse.Namespace, *, helps: bool) -> None:
    try:
        if helps:
            _copy_for_others(one, options)
        else:
            _publish(one)
    except CheckpointError as error:
        one.fail(error)
    if one.is_ended and not options.json:
        print_line(one.text)


def _seconds(text: str) -> float:
    try:
        return 0.0 if text == "0" else parse_seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error

"""`mpickpt prune RUN --keep-last 3`: remove the checkpoints that no rule keeps."""

import argparse
import contextlib
from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any

from mpickpt.cli.output import nbytes_text, print_json, print_line, print_table
from mpickpt.cli.run_arguments import (
    NoLease,
    add_run_argument,
    count,
    require_run,
    writing_in,
)
from mpickpt.cli.status import WHOLE, UsageError
from mpickpt.planning.retention import (
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepPolicy,
    Verdict,
    plan_retention,
)
from mpickpt.storage.lease import Lease
from mpickpt.storage.remote_run import run_at
from mpickpt.storage.removal import remove_checkpoint
from mpickpt.storage.run_entry import Run, RunEntry, retention_candidates

_COLUMNS = (">step", ">size", "verdict", "reason")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    add_run_argument(parser)
    rules: dict[str, Any] = {"dest": "rules", "action": "append"}
    parser.add_argument("--keep-last", metavar="N", type=_last, **rules)
    parser.add_argument(
        "--keep-every", metavar="N", type=_every, **rules, help="multiples of N"
    )
    parser.add_argument(
        "--keep-best",
        metavar="N:METRIC[:MODE]",
        type=_best,
        **rules,
        help="the best N by a metric; MODE is min or max, by default min",
    )
    parser.add_argument("--dry-run", action="store_true", help="remove nothing")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print a verdict for each checkpoint with its reason, then remove."""
    if not options.rules:
        raise UsageError("say what to keep: --keep-last, --keep-every or --keep-best")
    require_run(options.run_dir)
    pruned = run_at(options.run_dir)
    keep = reduce(or_, options.rules)
    with contextlib.ExitStack() as stack:
        lease = None
        if not options.dry_run:
            lease = stack.enter_context(writing_in(options.run_dir))
        entries = pruned.candidates()
        _require_metrics(options.rules, entries)
        verdicts = plan_retention(retention_candidates(entries), keep)
        rows = list(zip(entries, verdicts, strict=True))
        _print_plan(rows, json=options.json)
        removed = [entry for entry, verdict in rows if not verdict.keep]
        if lease is not None:
            _remove(pruned, removed, lease)
    if not options.json:
        size = nbytes_text(sum(entry.nbytes for entry in removed))
        what = "would remove" if options.dry_run else "removed"
        print_line(f"{what} {len(removed)} of {len(entries)} checkpoints, {size}")
    return WHOLE


def _require_metrics(rules: Sequence[KeepPolicy], entries: Sequence[RunEntry]) -> None:
    """Raise if a rule goes by a metric that no checkpoint has: it is mistyped."""
    known = {name for entry in entries for name in entry.metrics}
    for rule in rules:
        if entries and isinstance(rule, KeepBest) and rule.metric not in known:
            names = ", ".join(sorted(known)) or "none at all"
            raise UsageError(
                f"no checkpoint has the metric {rule.metric!r}, so the rule would keep "
                f"none; known are: {names}"
            )


def _remove(pruned: Run, entries: Sequence[RunEntry], lease: Lease | NoLease) -> None:
    for entry in entries:
        lease.require()
        if not remove_checkpoint(entry.path):
            print_line(
                f"{entry.path} stays: it holds files that are not a checkpoint's"
            )
        pruned.forget(entry.step)


def _print_plan(rows: Sequence[tuple[RunEntry, Verdict]], *, json: bool) -> None:
    if json:
        print_json([_described(entry, verdict) for entry, verdict in rows])
    elif rows:
        print_table(_COLUMNS, [_row(entry, verdict) for entry, verdict in rows])


def _described(entry: RunEntry, verdict: Verdict) -> dict[str, Any]:
    return {
        "step": entry.step,
        "path": str(entry.path),
        "nbytes": entry.nbytes,
        "keep": verdict.keep,
        "reason": verdict.reason,
    }


def _row(entry: RunEntry, verdict: Verdict) -> list[str]:
    size = "?" if entry.manifest is None else nbytes_text(entry.nbytes)
    return [
        str(entry.step),
        size,
        "keep" if verdict.keep else "remove",
        verdict.reason,
    ]


def _last(text: str) -> KeepPolicy:
    return KeepLast(count(text))


def _every(text: str) -> KeepPolicy:
    return KeepEvery(count(text))


def _best(text: str) -> KeepPolicy:
    number, _, metric = text.partition(":")
    name, _, mode = metric.rpartition(":")
    if not name or mode not in ("min", "max"):
        name, mode = metric, "min"
    if not name:
        raise argparse.ArgumentTypeError(f"{text!r}: expected N:METRIC, as in 3:loss")
    return KeepBest(count(number), name, "max" if mode == "max" else "min")

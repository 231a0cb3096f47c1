"""Disks that really fill, are remounted, or let nobody write, while ranks save."""

import contextlib
import errno
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tests.faults.errors_runner import SIZE, Job, Said
from tests.faults.errors_verdict import Expected, verdict_of
from tests.faults.matrix import Case, Verdict

PROGRAM = Path(__file__).parent / "programs" / "errors_disks.py"
DISK = "size=16m,nr_inodes=800"
MODES = ("sync", "overwrite", "poll", "thread", "manager", "background", "rewind")
# Around 340 KiB are written: four shards, the layout, receipts, the manifest.
LEFT_KIB = (0, 4, 40, 88, 160, 280, 340, 348, 352, 356, 360, 364)
INODES = (0, 1, 2, 3, 4, 5, 6)
LEASE_CALLS = ("openat", "pwrite64", "close")
LEASE_ERRNOS = ("ENOSPC", "EDQUOT", "EIO", "ESTALE")
# Without these, root obeys the modes of files as anybody does.
OBEYING = "setpriv --bounding-set -dac_override,-dac_read_search --inh-caps -all"

_ALL = frozenset(range(SIZE))
_CLOSED = ("run-directory-closed", "step-directory-closed")


def cases() -> list[Case]:
    """Return all cases, always in the same order."""
    return [
        Case(name=name, in_ci=number % 4 == 0)
        for number, name in enumerate(_described())
    ]


@contextlib.contextmanager
def jobs(names: Sequence[str], folder: Path) -> Iterator[list[Job]]:
    """Have a small disk for each of the programs meanwhile."""
    chosen = [_described()[name] for name in names if name in _described()]
    obeying = [case for case in chosen if case["trouble"] in (*_CLOSED, "other-user")]
    others = [case for case in chosen if case not in obeying]
    with contextlib.ExitStack() as stack:
        made = []
        for group, prefix in ((others, ()), (obeying, tuple(OBEYING.split()))):
            if group:
                disk = folder / f"disk{len(made)}"
                stack.enter_context(mounted(disk))
                made.append(
                    Job(
                        arguments=(str(PROGRAM), str(disk)),
                        cases=tuple(group),
                        judge=_judge,
                        prefix=prefix,
                    )
                )
        yield made


@contextlib.contextmanager
def mounted(point: Path) -> Iterator[None]:
    """Mount a small disk."""
    point.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", DISK, "none", str(point)]
    subprocess.run(mount, check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(point)], check=True)


@cache
def _described() -> dict[str, Said]:
    """Return what the program takes, by name."""
    return {case["name"]: case for case in _all_cases()}


def _all_cases() -> Iterator[Said]:
    for mode in MODES:
        for left in LEFT_KIB:
            yield _case(mode, "disk-fills", moment="prepared", amount=left)
        for left in INODES:
            moment = "before" if left == 0 else "prepared"
            yield _case(mode, "no-inodes", moment=moment, amount=left)
        for trouble in ("read-only", "run-directory-closed", "step-directory-closed"):
            for moment in _moments_of(trouble, mode):
                yield _case(mode, trouble, moment=moment)
        for rank in (0, 2, 3):
            yield _case(mode, "too-many-files", moment="before", rank=rank)
            yield _case(mode, "file-size", moment="before", rank=rank, amount=50)
        yield _case(mode, "other-user", moment="before", rank=2)
    for call in LEASE_CALLS:
        for error in LEASE_ERRNOS:
            yield _case("beat", call, moment="before") | {
                "name": f"lease-beat/{call}/{error}",
                "inject": f"{call}:error={error}",
            }


def _moments_of(trouble: str, mode: str) -> tuple[str, ...]:
    if trouble == "run-directory-closed":
        return ("before",)
    if trouble == "read-only":
        return ("before", "prepared", "publish")
    return ("prepared", "publish")


def _case(mode: str, trouble: str, *, rank: int = 0, **more: Any) -> Said:
    name = f"{trouble}/{mode}"
    if trouble in ("disk-fills", "no-inodes"):
        name += f"/{more['amount']}-left"
    elif trouble in ("too-many-files", "file-size"):
        name += f"/rank{rank}"
    else:
        name += f"/{more['moment']}"
    return {"name": name, "mode": mode, "trouble": trouble, "rank": rank, **more}


_ERRNOS = {
    "disk-fills": errno.ENOSPC,
    "no-inodes": errno.ENOSPC,
    "read-only": errno.EROFS,
    "run-directory-closed": errno.EACCES,
    "step-directory-closed": errno.EACCES,
    "other-user": errno.EACCES,
    "too-many-files": errno.EMFILE,
    "file-size": errno.EFBIG,
}


def _judge(said: Said) -> Verdict:
    case = _described()[said["case"]]
    trouble = case["trouble"]
    # All ranks see the disk; the lowest of those that failed is named.
    own = trouble not in ("disk-fills", "no-inodes", "read-only", *_CLOSED)
    number = _ERRNOS.get(trouble) or getattr(errno, case["name"].rpartition("/")[2])
    expected = Expected(
        mode=case["mode"],
        ranks=frozenset({case["rank"]}) if own else _ALL,
        errnos=frozenset({number}),
        must_raise=_must_raise(case),
        may_be_unknown=True,
    )
    return verdict_of(expected, said["run"], said["ranks"])


def _must_raise(case: Said) -> bool:
    """Tell whether there cannot have been room, or a right to write, for all."""
    if case["mode"] == "beat":
        return False
    if case["trouble"] == "run-directory-closed":
        return case["mode"] != "overwrite"
    if case["trouble"] == "disk-fills":
        return case["amount"] < 340
    if case["trouble"] == "no-inodes":
        return case["amount"] < SIZE
    return True

"""Tells whether the group that may read a run may read what a save made; reads only.

Files follow the umask of the job and the set-gid bit of the directory, as those of
every program: nothing is changed here, it is said.
"""

import contextlib
import grp
import os
import stat
from collections.abc import Iterable
from pathlib import Path

_STATUS = Path("/proc/self/status")


def permission_notes(run_dir: Path, made: Iterable[Path]) -> tuple[str, ...]:
    """Return what the group of a run directory loses by the permissions of a save.

    Parameters
    ----------
    run_dir : Path
        The run directory: a group that may read it is meant to read what lies in it.
    made : iterable of Path
        Files and directories that the save has made, as they are: ACLs and mount
        options have their say in it too.

    Returns
    -------
    tuple of str
        A sentence for each kind of loss, none where there is none or the file system
        does not tell.
    """
    notes: dict[str, str] = {}
    with contextlib.suppress(OSError):
        run = os.stat(run_dir)
        # Nobody's group stands for those who share a place such as /tmp.
        if not run.st_mode & stat.S_ISVTX and _is_open_to_group(run):
            for path in made:
                kind, note = _loss(run_dir, run, path)
                notes.setdefault(kind, note)
    return tuple(filter(None, notes.values()))


def _loss(run_dir: Path, run: os.stat_result, path: Path) -> tuple[str, str]:
    """Return (kind, sentence) of what the group loses by a file or directory."""
    found = os.stat(path)
    group, mode = _group_name(run.st_gid), f"{stat.S_IMODE(found.st_mode):04o}"
    told = f"{run_dir} is open to group {group}, but {path}"
    is_same = found.st_gid == run.st_gid
    is_readable = _is_open_to_all(found) or (is_same and _is_open_to_group(found))
    if not is_readable and is_same:
        umask = _umask_in_words()
        return "mode", f"{told} has mode {mode}{umask}; umask 027 would let it read"
    if not is_readable:
        own = f"belongs to group {_group_name(found.st_gid)} (mode {mode})"
        why = "has no set-gid bit"
        if run.st_mode & stat.S_ISGID:
            why = "has a set-gid bit, which had no effect"
        return "group", f"{told} {own}, for the directory {why}"
    lost = run.st_mode & ~found.st_mode & stat.S_ISGID
    if lost and stat.S_ISDIR(found.st_mode):
        return "set-gid", f"{told} did not take over its set-gid bit"
    return "", ""


def _is_open_to_group(found: os.stat_result) -> bool:
    return _has(found, stat.S_IRGRP, stat.S_IXGRP)


def _is_open_to_all(found: os.stat_result) -> bool:
    return _has(found, stat.S_IROTH, stat.S_IXOTH)


def _has(found: os.stat_result, read: int, enter: int) -> bool:
    bits = read | enter if stat.S_ISDIR(found.st_mode) else read
    return found.st_mode & bits == bits


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _umask_in_words() -> str:
    """Return what the umask is, "" where the kernel does not tell.

    `os.umask` can only ask by setting it, for all threads.
    """
    with contextlib.suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "Umask":
                return f", for the umask is {value.strip()}"
    return ""

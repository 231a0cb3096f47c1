"""Reads with which options a file system is mounted; reads only."""

import os
from pathlib import Path

from mpickpt.storage import filesystem
from mpickpt.storage.filesystem import Mount, find_mount, mount_of


def mount_options_of(path: Path) -> tuple[str, ...]:
    """Return the options of the mount that a path lies on: ("rw", "hard", "vers=4.2").

    Those of the mount come first, those of the file system next. None where the kernel
    does not tell.
    """
    mount = mount_of(path)
    if mount is None:
        return ()
    try:
        text = filesystem.MOUNTINFO.read_text(errors="surrogateescape")
    except OSError:
        return ()
    return find_options(text.splitlines(), os.path.realpath(path), mount)


def find_options(lines: list[str], path: str, mount: Mount) -> tuple[str, ...]:
    """Return the options of a mount, given the lines of mountinfo."""
    for line in reversed(lines):
        if find_mount([line], path, "") == mount:
            fields, _, rest = line.partition(" - ")
            of_mount, of_system = fields.split(" ")[5], rest.split(" ")[2:]
            words = ",".join([of_mount, *of_system]).split(",")
            return tuple(dict.fromkeys(word for word in words if word))
    return ()

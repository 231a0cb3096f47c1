"""Finds the directory that a node has for itself, and its name; no MPI."""

import os
import re
import socket
from pathlib import Path

from mpickpt.errors import StorageError
from mpickpt.format.naming import mark_name, parse_mark_name
from mpickpt.storage.commit import storage_errors
from mpickpt.storage.second_look import list_afresh
from mpickpt.storage.shared_mark import make_mark, remove_mark

NODE_FIELD = "{node}"

_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


def node_name() -> str:
    """Return the name by which the job knows this node: Slurm's, else the host's."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def own_directory(template: str | os.PathLike[str]) -> Path:
    """Return the directory of this node that a template stands for, absolute.

    Parameters
    ----------
    template : path-like
        "~", "$VAR", "${VAR}" and "{node}", the node's name, are filled in.

    Raises
    ------
    ValueError
        A variable is not set here.
    """
    path = _VARIABLE.sub(_value, os.path.expanduser(os.fspath(template)))
    return Path(os.path.abspath(path.replace(NODE_FIELD, node_name())))


class OwnDisk:
    """Proves that no other node writes to the directory that this one calls its own.

    Parameters
    ----------
    directory : Path
        The directory.
    token : str
        32 hex digits, of this node and this save alone.

    Notes
    -----
    For one process a node. First all make their marks, then all look.
    """

    def __init__(self, directory: Path, token: str) -> None:
        self._directory = directory
        self._token = token

    def mark(self) -> None:
        """Make the mark of this node; not durable."""
        make_mark(self._directory, self._token)

    def require_alone(self) -> None:
        """Raise unless the mark of this node is the only one.

        Raises
        ------
        StorageError
            Another node has made its mark here too, or the file system refuses.
        """
        with storage_errors("list", self._directory):
            names = list_afresh(self._directory)
        marks = {name for name in names if parse_mark_name(name)}
        if marks != {mark_name(self._token)}:
            raise StorageError(
                f"{self._directory} is one directory for several nodes; a LocalTier "
                f"needs one of each node: put {NODE_FIELD} into its path, or use a "
                "DirectoryTier for what all nodes share",
                path=str(self._directory),
            )

    def unmark(self) -> None:
        """Remove the mark, as well as can be; the sweep takes what stays."""
        remove_mark(self._directory, self._token)


def _value(found: re.Match[str]) -> str:
    name = found[1] or found[2]
    if name not in os.environ:
        raise ValueError(f"{found.string}: the variable {name} is not set")
    return os.environ[name]

"""Looks again where this node may only remember how things were; files, no MPI.

On a network file system each node keeps for a while what it saw of a name: that it was
absent, which file or directory it stood for, and how large that was. What another node
has made, renamed or removed since is then missing, stale or of another size. Listing
the directory asks the server, and so makes the node forget.
"""

import os
import time
from errno import ENOENT, ESTALE
from pathlib import Path

from mpickpt.errors import IncompleteCheckpointError
from mpickpt.format.naming import MANIFEST_NAME

# Names come late by a second or two where listing does not help; who waits for one
# that never comes should still be told soon.
PATIENCE_S = 3.0

_SHORTEST_WAIT_S = 0.01
_LONGEST_WAIT_S = 0.25


class SecondLook:
    """Decides how often to look at a file that was not as it should be.

    Parameters
    ----------
    path : Path
        The file.
    is_new : bool
        Whether another node is known to have made it a moment ago, so that it may come
        late even to a listing.
    """

    def __init__(self, path: Path, *, is_new: bool = False) -> None:
        self._path = path
        self._is_new = is_new
        self._wait_s = 0.0
        self._deadline_s = 0.0

    def helps(self, error: Exception) -> bool:
        """Tell whether to look again, having asked the server, and waited a little.

        Parameters
        ----------
        error : Exception
            How the last look has ended. One that no other look would mend, as a file
            that may not be read, gives False at once.
        """
        if not (isinstance(error, IncompleteCheckpointError) or is_gone(error)):
            return False
        is_listed = _is_listed(self._path)
        if not self._wait_s:
            self._deadline_s = time.monotonic() + PATIENCE_S
            self._wait_s = _SHORTEST_WAIT_S
            return True
        # A file that is too short and a name that nobody lists are damage, unless new.
        is_damage = isinstance(error, IncompleteCheckpointError) and not (
            is_listed and error.actual is None
        )
        if (is_damage and not self._is_new) or time.monotonic() >= self._deadline_s:
            return False
        time.sleep(self._wait_s)
        self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S)
        return True


def is_gone(error: Exception) -> bool:
    """Tell whether an error says that a file or its handle is not there any more."""
    number = error.errno if isinstance(error, OSError) else None
    return number in (ENOENT, ESTALE)


def list_afresh(directory: Path) -> list[str]:
    """Return the names in a directory as the server has them, not as remembered.

    Raises
    ------
    OSError
        As `os.listdir`.
    """
    try:
        return os.listdir(directory)
    except OSError as error:
        # This node may remember that the name was absent, or stood for a directory
        # that has gone; then listing what is above asks for that name again.
        if not is_gone(error) or directory == directory.parent:
            raise
    list_afresh(directory.parent)
    return os.listdir(directory)


def meet(directory: Path, inode: int | None = None) -> None:
    """Make this node see a directory that another one has just made or met.

    Parameters
    ----------
    directory : Path
        The directory.
    inode : int, optional
        Its inode number, as the other node sees it. A node that remembers another
        directory of that name, which was renamed since, would write into that one.

    Raises
    ------
    OSError
        If it does not come within a few seconds.
    """
    look = SecondLook(directory, is_new=True)
    while True:
        try:
            if inode is not None and os.stat(directory).st_ino != inode:
                _forget_other(directory, inode)
            os.stat(directory)
            return
        except OSError as error:
            if not look.helps(error):
                raise


def _forget_other(directory: Path, inode: int) -> None:
    """Wait until a name stands for the directory of this number, as far as it helps.

    Some file systems number alike on no two nodes. There the directory of a save, but
    for one that overwrites, is told from one set aside by having no manifest.
    """
    deadline_s = time.monotonic() + PATIENCE_S
    list_afresh(directory.parent)
    while os.stat(directory).st_ino != inode and time.monotonic() < deadline_s:
        if not os.path.lexists(directory / MANIFEST_NAME):
            return
        time.sleep(_LONGEST_WAIT_S / 5)
        list_afresh(directory.parent)


def outlast(path: Path) -> None:
    """Wait until this node forgets a name that the server does not list any more.

    Listing does not make it: GlusterFS finds a directory that another node renamed by
    its old name for a second. Ends after a few seconds in any case.
    """
    deadline_s = time.monotonic() + PATIENCE_S
    while os.path.lexists(path) and not _is_listed(path):
        if time.monotonic() >= deadline_s:
            return
        time.sleep(_LONGEST_WAIT_S / 5)


def _is_listed(path: Path) -> bool:
    try:
        return path.name in list_afresh(path.parent)
    except OSError:
        return False

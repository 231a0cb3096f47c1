"""Makes sure that all nodes of a job see one directory, and says so where they do not.

A path can name another directory on each node: its own disk, or nothing at all where a
file system is not mounted. Which ranks see the same files for sure they tell each
other; of each other group one rank looks.
"""

from collections.abc import Sequence
from pathlib import Path

from mpickpt.errors import CheckpointError, from_record, to_record
from mpickpt.parallel.conversation import Conversation
from mpickpt.parallel.line import ROOT
from mpickpt.parallel.waiting import Steps
from mpickpt.storage.places import Place
from mpickpt.storage.remote_path import RemotePath
from mpickpt.storage.shared_mark import (
    MarkSearch,
    Witness,
    explanation,
    make_mark,
    other_sight,
    own_view,
    remove_mark,
    witness,
)

PHASE = "look from every node"


def lookers(views: Sequence[bytes]) -> list[int]:
    """Return the lowest rank of each group that may see other files than rank 0.

    Parameters
    ----------
    views : sequence of bytes
        What `own_view` gave on every rank.
    """
    lowest: dict[bytes, int] = {}
    for rank, view in enumerate(views):
        lowest.setdefault(view, rank)
    return sorted(rank for rank in lowest.values() if rank != ROOT)


def require_one_directory(
    talk: Conversation, directory: Path, save_id: str
) -> Steps[None]:
    """Raise on every rank unless all nodes see the directory that rank 0 has made.

    Parameters
    ----------
    talk : Conversation
        The ranks.
    directory : Path
        Of the checkpoint; the root has just made it or met it.
    save_id : str
        Of the save.

    Raises
    ------
    StorageError
        Some node has another directory of that name, or none.

    Notes
    -----
    Collective. One Allgather of 16 bytes where all ranks are on one node. Leaves
    nothing behind.
    """
    if talk.size == 1:
        return
    looking = lookers((yield from talk.allgather(own_view(), PHASE)))
    if not looking:
        return

    def make() -> bytes:
        make_mark(directory, save_id)
        return witness(directory, talk.rank, talk.host).encode()

    try:
        maker = Witness.decode((yield from talk.on_root(make, PHASE)))
        search = MarkSearch(
            directory,
            save_id,
            maker=maker,
            own=witness(directory, talk.rank, talk.host),
        )
        looks = search.find if talk.rank in looking else _has_seen
        yield from talk.work(
            lambda _cancelled: looks(), PHASE, moved=lambda: search.n_looks
        )
    finally:
        if talk.rank == ROOT:
            remove_mark(directory, save_id)


def explain_missing(
    talk: Conversation, directory: Place, checkpoint_id: str, error: CheckpointError
) -> Steps[None]:
    """Raise an error that says more where nodes do not see one directory.

    Parameters
    ----------
    talk : Conversation
        The ranks.
    directory : Path or RemotePath
        Of the checkpoint; all nodes see one store.
    checkpoint_id : str
        What the manifest says that rank 0 has read.
    error : CheckpointError
        Raised by the load, on all ranks alike, because something is missing.

    Notes
    -----
    Collective. Returns where nothing is to be added.
    """
    if talk.size == 1 or isinstance(directory, RemotePath):
        return
    looking = lookers((yield from talk.allgather(own_view(), PHASE)))
    if not looking:
        return
    sight = other_sight(directory, checkpoint_id) if talk.rank in looking else ""
    flags = yield from talk.allgather(bytes([bool(sight)]), PHASE)
    if not any(map(any, flags)):
        return
    other = next(rank for rank, flag in enumerate(flags) if any(flag))
    own = witness(directory, talk.rank, talk.host).encode()
    reader = Witness.decode((yield from talk.bcast(own, PHASE)))
    looker = Witness.decode((yield from talk.bcast(own, PHASE, other)))
    told = (yield from talk.bcast(sight.encode(), PHASE, other)).decode()
    more = explanation(directory, reader, looker, told)
    raise _with_more(error, more) from error


def _has_seen() -> None:
    pass


def _with_more(error: CheckpointError, more: str) -> CheckpointError:
    """Return an error like another one, on which all ranks agreed, that says more."""
    record = to_record(error)
    record["message"] = f"{error.message}: {more}"
    raised = from_record(record)
    raised.rank, raised.host = error.rank, error.host
    raised.failures = error.failures
    return raised

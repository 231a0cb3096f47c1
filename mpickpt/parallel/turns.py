"""Gives ranks turns at the file system, so that not all create or open at once."""

from mpickpt.parallel.conversation import Conversation
from mpickpt.planning.pace import AT_ONCE, LONGEST_S, delay_s
from mpickpt.storage.filesystem import file_system_of
from mpickpt.storage.places import Place
from mpickpt.storage.remote_path import RemotePath


def turn_to_create_s(talk: Conversation, creates_per_s: float | None) -> float:
    """Return how long this rank waits before it creates its shard.

    Parameters
    ----------
    talk : Conversation
        The ranks; none waits so long that others would miss it.
    creates_per_s : float or None
        How many files the ranks together may create each second.
    """
    longest_s = min(LONGEST_S, talk.timeout_s / 4)
    return delay_s(talk.rank, talk.size, creates_per_s, most_s=longest_s)


def turn_to_open_s(talk: Conversation, directory: Place) -> float:
    """Return how long this rank waits before it opens shards of a checkpoint.

    Opening asks the server for less than creating does; but a world opens its shards
    twice, and with nothing to write in between. A store has no such server.

    Raises
    ------
    StorageError
        If the file system does not answer.
    """
    if talk.size <= AT_ONCE or isinstance(directory, RemotePath):
        return 0.0
    return turn_to_create_s(talk, file_system_of(directory).habits.creates_per_s)

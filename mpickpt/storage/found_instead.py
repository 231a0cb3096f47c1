"""Says what is at a place where no checkpoint is; reads names only."""

from collections.abc import Sequence
from itertools import islice

from mpickpt.errors import CheckpointNotFoundError, StorageError
from mpickpt.format.naming import MANIFEST_NAME, parse_shard_name
from mpickpt.storage.filesystem import is_directory
from mpickpt.storage.places import Place, absolute, is_there
from mpickpt.storage.remote_path import RemotePath
from mpickpt.storage.second_look import is_gone
from mpickpt.storage.small_file import names_in
from mpickpt.storage.step_directories import CheckpointEntry, checkpoints

_MOST_NAMES = 5
_MOST_ASKED = 1000


def not_found(directory: Place) -> CheckpointNotFoundError:
    """Return the error for a place without checkpoint, which tells what is there."""
    place = absolute(directory)
    return CheckpointNotFoundError(f"no checkpoint at {place}: {_found_instead(place)}")


def _found_instead(directory: Place) -> str:
    if isinstance(directory, RemotePath):
        return _kept_instead(directory)
    if not is_there(directory):
        parents = (parent for parent in directory.parents if is_directory(parent))
        return f"it does not exist; {next(parents, '/')} does"
    published = checkpoints(directory)
    if published:
        return f"it is a run directory that {_holding(published)}"
    names = sorted(names_in(directory))
    n_shards = sum(parse_shard_name(name) is not None for name in names)
    if n_shards:
        return (
            f"it holds {n_shards} shards but no {MANIFEST_NAME}: a save that was not "
            "published, running or interrupted"
        )
    if not names:
        return "the directory is empty"
    return f"the directory holds {_some(names)}"


def _kept_instead(directory: RemotePath) -> str:
    try:
        published = checkpoints(directory)
        if published:
            return f"it is a run directory that {_holding(published)}"
        names = [one.name for one in islice(directory.store.list(), _MOST_ASKED)]
    except StorageError as error:
        if not is_gone(error):
            raise
        return error.message  # of the bucket
    n_shards = sum(parse_shard_name(n.rpartition("/")[2]) is not None for n in names)
    if n_shards:
        return (
            f"it holds {n_shards} shards but no {MANIFEST_NAME}: a copy that was not "
            "published, running or interrupted"
        )
    if names:
        return f"it holds {_some(sorted(names))}"
    beside = checkpoints(directory.parent)
    more = f"; {directory.parent} {_holding(beside)}" if beside else ""
    return f"nothing is stored there{more}"


def _holding(published: Sequence[CheckpointEntry]) -> str:
    return f"holds {len(published)}; the latest is {published[-1].path}"


def _some(names: Sequence[str]) -> str:
    more = ", …" if len(names) > _MOST_NAMES else ""
    return f"{', '.join(names[:_MOST_NAMES])}{more}"

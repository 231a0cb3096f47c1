"""The exit status of the commands, for scripts; touches nothing."""

from mpickpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptShardError,
    IncompleteCheckpointError,
    LayoutError,
    ManifestError,
    StorageError,
)

WHOLE = 0
FAILED = 1
USAGE = 2
DAMAGED = 3
DIFFERENT = 3
NO_CHECKPOINT = 4
UNREADABLE = 5
UNFINISHED = 6
INTERRUPTED = 130
# As a shell reports a command that a closed pipe killed.
BROKEN_PIPE = 141

_DAMAGE = (CorruptShardError, IncompleteCheckpointError, LayoutError, ManifestError)


class UsageError(Exception):
    """Report that a command was asked for what it cannot do."""


def status_of(error: CheckpointError) -> int:
    """Return the exit status for an error that ended a command."""
    if isinstance(error, CheckpointNotFoundError):
        return NO_CHECKPOINT
    if isinstance(error, _DAMAGE):
        return DAMAGED
    return UNREADABLE if isinstance(error, StorageError) else FAILED

"""Defines every error that the library raises; touches nothing.

::

    CheckpointError                     .rank .host .failures
    ├── CheckpointNotFoundError         (FileNotFoundError)
    ├── CheckpointExistsError           (FileExistsError)
    ├── ManifestError                   (ValueError)
    ├── IncompleteCheckpointError
    ├── CorruptShardError               .path .expected .actual
    ├── WorldSizeMismatchError          (ValueError)  .saved .current .keys
    ├── LayoutError                     (ValueError)  .key .ranks
    ├── CallMismatchError               (ValueError)
    ├── StateTypeError                  (TypeError)   .key
    ├── ReplicaMismatchError            (ValueError)  .key .ranks
    ├── StorageError                    (OSError)     .errno .path
    ├── LeaseHeldError                  .path .job .node .pid
    └── CollectiveTimeoutError          (TimeoutError) .phase .missing_ranks .outcome

An error travels between ranks as a record of plain values (`to_record`,
`from_record`), so every rank raises the same one. Nothing is pickled for that,
but every class survives pickling, because user programs do pickle errors.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

Record = dict[str, Any]


class CheckpointError(Exception):
    """Report that a checkpoint could not be saved, loaded or read.

    Parameters
    ----------
    message : str
        What failed, where, what was expected, what was found, what to do next.
    **attributes
        Values of the attributes that the class lists in `attribute_names`.

    Attributes
    ----------
    rank : int or None
        Rank on which it failed, where that is known.
    host : str or None
        Host of that rank.
    failures : dict of int to CheckpointError
        The error of every failing rank; equal on all ranks.
    """

    attribute_names: ClassVar[tuple[str, ...]] = ()
    rank: int | None
    host: str | None
    failures: "dict[int, CheckpointError]"

    def __init__(self, message: str, **attributes: Any) -> None:
        Exception.__init__(self, message)
        self.message = message
        self.rank = attributes.pop("rank", None)
        self.host = attributes.pop("host", None)
        self.failures = attributes.pop("failures", {})
        for name in self.attribute_names:
            setattr(self, name, attributes.pop(name, None))
        if attributes:
            raise TypeError(f"{type(self).__name__} has no {sorted(attributes)}")

    def __str__(self) -> str:
        if self.rank is None:
            return self.message
        others = sorted(set(self.failures) - {self.rank})
        also = f"; also failed: ranks {_shortened(others)}" if others else ""
        where = f" on {self.host}" if self.host else ""
        return f"[rank {self.rank}{where}{also}] {self.message}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self._attributes())

    def _attributes(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in self.attribute_names}
        return own | {"rank": self.rank, "host": self.host, "failures": self.failures}


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """Report that a path holds no published checkpoint."""


class CheckpointExistsError(CheckpointError, FileExistsError):
    """Report that a path already holds a published checkpoint."""


class ManifestError(CheckpointError, ValueError):
    """Report a manifest that is damaged, of a newer schema, or breaks a rule."""


class IncompleteCheckpointError(CheckpointError):
    """Report that a file of the checkpoint is missing or has another size."""

    attribute_names = ("path", "expected", "actual")
    path: str | None
    expected: int | None
    actual: int | None


class CorruptShardError(CheckpointError):
    """Report bytes that differ from the digest that was saved for them."""

    attribute_names = ("path", "expected", "actual")
    path: str | None
    expected: str | None
    actual: str | None


class WorldSizeMismatchError(CheckpointError, ValueError):
    """Report a checkpoint of another world size that may not be loaded as asked."""

    attribute_names = ("saved", "current", "keys")
    saved: int | None
    current: int | None
    keys: list[str] | None


class LayoutError(CheckpointError, ValueError):
    """Report boxes, shapes or types that do not fit together."""

    attribute_names = ("key", "ranks")
    key: str | None
    ranks: list[int] | None


class CallMismatchError(CheckpointError, ValueError):
    """Report that ranks made one collective call with different arguments."""


class StateTypeError(CheckpointError, TypeError):
    """Report a value that cannot be saved, or an array that is nobody's."""

    attribute_names = ("key",)
    key: str | None


class ReplicaMismatchError(CheckpointError, ValueError):
    """Report a replicated value that is not the same on all ranks."""

    attribute_names = ("key", "ranks")
    key: str | None
    ranks: list[int] | None


class StorageError(CheckpointError, OSError):
    """Report that the file system refused: full, quota, I/O error, stale handle.

    `outcome` is "unknown" where a failure while publishing could not be taken back.
    """

    attribute_names = ("errno", "path", "outcome")
    errno: int | None
    path: str | None
    outcome: str | None


class LeaseHeldError(CheckpointError):
    """Report that another job writes in the run directory.

    Attributes
    ----------
    path : str
        The run directory.
    job, node, pid : str, str, int
        Who holds the lease, as far as that can be read.
    """

    attribute_names = ("path", "job", "node", "pid")
    path: str | None
    job: str | None
    node: str | None
    pid: int | None


class CollectiveTimeoutError(CheckpointError, TimeoutError):
    """Report that other ranks did not arrive in time, or died.

    Attributes
    ----------
    phase : str
        The step of the protocol that was waited in.
    missing_ranks : list of int
        Ranks that did not arrive, as well as can be known.
    outcome : {"unpublished", "unknown"} or None
        For a save: whether the new checkpoint can have been published.
    """

    attribute_names = ("phase", "missing_ranks", "outcome")
    phase: str | None
    missing_ranks: list[int] | None
    outcome: str | None


def to_record(error: CheckpointError) -> Record:
    """Return the error as plain values that JSON can hold."""
    own = {name: getattr(error, name) for name in error.attribute_names}
    return {"class": type(error).__name__, "message": error.message, "own": own}


def from_record(record: Mapping[str, Any]) -> CheckpointError:
    """Return the error that `to_record` described."""
    classes = {cls.__name__: cls for cls in _all_classes()}
    return classes[record["class"]](record["message"], **record["own"])


def _all_classes() -> list[type[CheckpointError]]:
    return [CheckpointError, *CheckpointError.__subclasses__()]


def _rebuild(
    cls: type[CheckpointError], message: str, attributes: dict[str, Any]
) -> CheckpointError:
    return cls(message, **attributes)


def _shortened(ranks: list[int], most: int = 8) -> str:
    text = ", ".join(map(str, ranks[:most]))
    return text if len(ranks) <= most else f"{text}, … ({len(ranks)} in all)"

"""Errors as bytes that travel between ranks; no MPI here, and no pickle."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mpickpt.errors import CheckpointError, from_record, to_record

MOST_RECORDS = 32
MOST_CHARACTERS = 20_000

# Builtin errors that are raised as themselves on every rank. Any other class may
# want arguments that a text cannot give it: it arrives as a CheckpointError.
PLAIN_ERRORS: Mapping[str, type[Exception]] = {
    cls.__name__: cls
    for cls in (
        TypeError,
        ValueError,
        KeyError,
        MemoryError,
        NotImplementedError,
        RuntimeError,
    )
}


def dump_failure(failure: BaseException, *, rank: int, host: str) -> bytes:
    """Return the record of a failure that `parse_failure` reads on every rank."""
    record = _record(failure)
    record["message"] = record["message"][:MOST_CHARACTERS]
    record["rank"] = _given(failure, "rank", rank)
    record["host"] = _given(failure, "host", host)
    return json.dumps(record, default=_plain).encode("ascii")


def parse_failure(record_bytes: bytes) -> Exception:
    """Return the error of a record, with `.rank` and `.host` set."""
    record = json.loads(record_bytes)
    error: Any
    if record["class"] in PLAIN_ERRORS:
        text = f"[rank {record['rank']} on {record['host']}] {record['message']}"
        error = PLAIN_ERRORS[record["class"]](text)
    else:
        error = from_record(record)
    error.rank, error.host = record["rank"], record["host"]
    error.failures = {}
    result: Exception = error
    return result


def join_failures(ranks: Sequence[int], records: Sequence[bytes]) -> Exception:
    """Return the lowest failing rank's error, with all errors in `.failures`.

    Parameters
    ----------
    ranks : sequence of int
        Every failing rank, ascending.
    records : sequence of bytes
        What the first of them sent.
    """
    # The raised error is not itself in `.failures`: a cycle could not be pickled.
    failures = {
        rank: parse_failure(record)
        for rank, record in zip(ranks, records, strict=False)
    }
    for rank in ranks[len(records) :]:
        text = f"failed as well; only the first {len(records)} ranks say how"
        failures[rank] = CheckpointError(text, rank=rank)
    error: Any = parse_failure(records[0])
    error.failures = failures
    result: Exception = error
    return result


def _record(failure: BaseException) -> dict[str, Any]:
    if isinstance(failure, CheckpointError):
        return to_record(failure)
    name = type(failure).__name__
    if PLAIN_ERRORS.get(name) is type(failure):
        text = str(failure.args[0]) if len(failure.args) == 1 else str(failure)
        return {"class": name, "message": text, "own": {}}
    text = f"{type(failure).__module__}.{type(failure).__qualname__}: {failure}"
    return {"class": "CheckpointError", "message": text, "own": {}}


def _given(failure: BaseException, name: str, own: Any) -> Any:
    known = getattr(failure, name, None)
    return own if known is None else known


def _plain(value: Any) -> Any:
    if hasattr(value, "__index__"):
        return int(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)

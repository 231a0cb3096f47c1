"""Finds the checkpoint that a path of Megatron-LM or NeMo leads to; no MPI."""

import json
import os
import re
from pathlib import Path
from typing import Any

from mpickpt.errors import (
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    ManifestError,
)
from mpickpt.interop.sources.containment import contained, names_inside, read_contained

CONFIG_NAME = "metadata.json"
COMMON_NAME = "common.pt"

_TRACKER_NAME = "latest_checkpointed_iteration.txt"
_INTEGRITY_NAME = "integrity.json"
_WEIGHTS_NAME = "weights"
_UNFINISHED = "-unfinished"
_ITERATION = re.compile(r"iter_(\d{1,18})")
_BACKENDS = ("torch_dist", "torch_dcp")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MOST_TRACKER_NBYTES = 64
_MOST_JSON_NBYTES = 64 << 20


def find_checkpoint(source: Path, iteration: int | None) -> Path:
    """Return the directory that has the `metadata.json` of one iteration.

    Parameters
    ----------
    source : Path
        That directory, or one of NeMo that has it as "weights", or the one that a
        training saved its iterations in.
    iteration : int or None
        Which of them; None is the latest.

    Raises
    ------
    CheckpointNotFoundError
        If there is none.
    IncompleteCheckpointError
        If it was not saved to its end.
    ManifestError
        If it is of a kind that is not known.
    """
    names = names_inside(source)
    if CONFIG_NAME in names:
        return _checked(source, iteration)
    if _WEIGHTS_NAME in names:
        _require_finished(source)
        return find_checkpoint(contained(source, _WEIGHTS_NAME), iteration)
    iterations = sorted(name for name in names if _ITERATION.fullmatch(name))
    if iteration is None and _TRACKER_NAME in names:
        name = _latest(source)
    elif iteration is not None and iterations:
        by_number = {iteration_of(name): name for name in iterations}
        name = by_number.get(iteration, f"iter_{iteration:07d}")
    else:
        raise _not_found(source, names, iterations)
    if name not in names:
        raise CheckpointNotFoundError(
            f"{source} has no {name}; there are {', '.join(iterations[-8:]) or 'none'}"
        )
    return _checked(contained(source, name), None)


def iteration_of(name: str) -> int | None:
    """Return the number in the name of an iteration's directory, None of another."""
    found = _ITERATION.fullmatch(name)
    return None if found is None else int(found[1])


def read_digests(directory: Path) -> dict[str, str] | None:
    """Return the SHA-256 of files by name; None without an `integrity.json`.

    Raises
    ------
    ManifestError
        If it is there and not of that form, or names files outside.
    """
    if _INTEGRITY_NAME not in names_inside(directory):
        return None
    document = _json(directory, _INTEGRITY_NAME)
    files = document.get("files")
    if document.get("algorithm") != "sha256" or not isinstance(files, dict):
        raise ManifestError(
            f"{directory / _INTEGRITY_NAME} has no SHA-256 of files, but "
            f"{document.get('algorithm')!r}"
        )
    for name, digest in files.items():
        contained(directory, name)
        if not isinstance(digest, str) or not _SHA256.fullmatch(digest.lower()):
            raise ManifestError(
                f"{directory / _INTEGRITY_NAME} has no SHA-256 for {name!r}"
            )
    return {name: digest.lower() for name, digest in files.items()}


def _checked(directory: Path, iteration: int | None) -> Path:
    if iteration is not None and iteration_of(directory.name) not in (None, iteration):
        raise CheckpointNotFoundError(
            f"{directory} is not iteration {iteration}; give the directory above it"
        )
    _require_finished(directory)
    if CONFIG_NAME not in names_inside(directory):
        raise IncompleteCheckpointError(
            f"{directory} has no {CONFIG_NAME}, which Megatron writes last: the save "
            "was not finished, or it is of a format before Megatron-core's "
            "dist_checkpointing",
            path=str(directory / CONFIG_NAME),
        )
    config = _json(directory, CONFIG_NAME)
    backend = (config.get("sharded_backend"), config.get("sharded_backend_version"))
    if backend[0] not in _BACKENDS or backend[1] != 1:
        raise ManifestError(
            f"{directory} was saved with the backend {backend[0]!r}, version "
            f"{backend[1]!r}; known is 'torch_dist', version 1. Load and save it once "
            "with Megatron and --ckpt-format torch_dist"
        )
    return directory


def _require_finished(directory: Path) -> None:
    for unfinished in (
        directory.name.endswith(_UNFINISHED),
        os.path.lexists(directory.with_name(directory.name + _UNFINISHED)),
        os.path.lexists(directory / f"{directory.name}{_UNFINISHED}"),
    ):
        if unfinished:
            raise IncompleteCheckpointError(
                f"{directory} is marked {_UNFINISHED!r} by NeMo: the save was not "
                "finished",
                path=str(directory),
            )


def _latest(source: Path) -> str:
    content = read_contained(source, _TRACKER_NAME, _MOST_TRACKER_NBYTES)
    text = content.decode("utf-8", "replace").strip()
    if text == "release":
        return "release"
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise ManifestError(
            f"{source / _TRACKER_NAME} holds {text!r}, which is no iteration"
        )
    return f"iter_{int(text):07d}"


def _not_found(
    source: Path, names: set[str], iterations: list[str]
) -> CheckpointNotFoundError | ManifestError:
    if any(name.startswith("mp_rank_") for name in names):
        return ManifestError(
            f"{source} is in Megatron's legacy format, one pickle for each model-"
            "parallel rank; load and save it once with --ckpt-format torch_dist"
        )
    if iterations:
        return CheckpointNotFoundError(
            f"{source} has no {_TRACKER_NAME} that says which of "
            f"{', '.join(iterations[-8:])} is the latest whole one; choose one with "
            "iteration=..."
        )
    return CheckpointNotFoundError(
        f"{source} has neither {CONFIG_NAME} nor {_WEIGHTS_NAME}/ nor {_TRACKER_NAME}: "
        "no checkpoint of Megatron-core or NeMo"
    )


def _json(directory: Path, name: str) -> dict[str, Any]:
    content = read_contained(directory, name, _MOST_JSON_NBYTES)
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{directory / name} is no JSON: {error}") from error
    if not isinstance(document, dict):
        raise ManifestError(f"{directory / name} is no JSON object")
    return document

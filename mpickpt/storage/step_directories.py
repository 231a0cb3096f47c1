"""Lists the directories of a run that are named after steps; reads names only."""

import os
from dataclasses import dataclass
from pathlib import Path

from mpickpt.format.naming import (
    MANIFEST_NAME,
    parse_rejected_directory,
    parse_step_directory,
)
from mpickpt.storage.places import Place, PlaceLike, directories_in, with_file
from mpickpt.storage.remote_path import parse_place


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEntry:
    """One published checkpoint of a run.

    Attributes
    ----------
    step : int
        The step that was saved.
    path : Path or RemotePath
        Its directory.
    """

    step: int
    path: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedStep:
    """One directory of a run that is named after a step, whatever it holds.

    Attributes
    ----------
    step : int
        The step in its name.
    path : Path or RemotePath
        The directory.
    is_rejected : bool
        Whether it was set aside, as damaged or left behind by a rewind.
    """

    step: int
    path: Place
    is_rejected: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlace(NamedStep):
    """One that was looked into.

    Attributes
    ----------
    is_published : bool
        Whether it has a manifest.
    """

    is_published: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDirectory(StepPlace):
    """One that lies in a file system."""

    path: Path


def checkpoints(run_dir: PlaceLike) -> tuple[CheckpointEntry, ...]:
    """Return the published checkpoints of a run, the lowest step first.

    Parameters
    ----------
    run_dir : path-like or URL
        Directory that holds checkpoints, or its URL in a store; one that does not
        exist has none.

    Raises
    ------
    StorageError
        If the file system or the store refuses.

    Notes
    -----
    Not collective; needs no MPI. Manifests are not opened.
    """
    return tuple(
        CheckpointEntry(step=found.step, path=found.path)
        for found in steps_at(run_dir)
        if found.is_published and not found.is_rejected
    )


def step_directories(run_dir: str | os.PathLike[str]) -> tuple[StepDirectory, ...]:
    """Return every directory of a run that is named after a step, in order of step.

    Also those of saves that were never published, and those that were set aside.
    """
    run = Path(run_dir)
    return tuple(
        StepDirectory(
            step=found.step,
            path=run / found.path.name,
            is_rejected=found.is_rejected,
            is_published=found.is_published,
        )
        for found in steps_at(run)
    )


def steps_at(run_dir: PlaceLike) -> tuple[StepPlace, ...]:
    """Return as `step_directories`, of a run in a directory or in a store."""
    run = parse_place(run_dir)
    named = named_steps(run)
    published = with_file(run, [found.path for found in named], MANIFEST_NAME)
    return tuple(
        StepPlace(
            step=found.step,
            path=found.path,
            is_rejected=found.is_rejected,
            is_published=is_published,
        )
        for found, is_published in zip(named, published, strict=True)
    )


def named_steps(run: Place) -> list[NamedStep]:
    """Return as `steps_at`, by names alone: nobody is asked what is in them."""
    found = [
        NamedStep(
            step=step,
            path=path,
            is_rejected=parse_rejected_directory(path.name) is not None,
        )
        for path in directories_in(run, _is_of_a_step)
        if (step := _step_in(path.name)) is not None
    ]
    return sorted(found, key=lambda one: (one.step, one.path.name))


def _is_of_a_step(name: str) -> bool:
    return _step_in(name) is not None


def _step_in(name: str) -> int | None:
    rejected = parse_rejected_directory(name)
    return rejected[0] if rejected else parse_step_directory(name)

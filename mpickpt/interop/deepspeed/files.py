"""Finds the files of a DeepSpeed checkpoint by their names; opens only `latest`."""

import os
import re
from pathlib import Path

import msgspec

from mpickpt.errors import (
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    ManifestError,
)
from mpickpt.interop.sources.containment import contained
from mpickpt.storage.commit import storage_errors
from mpickpt.storage.places import read_small_file

_LATEST = ("latest", "latest_universal")
_MOST_TAG_NBYTES = 1024
_ZERO = "zero"
_OPTIMIZER = "optimizer_state.pt"

_MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,9})_)?mp_rank_(\d{1,9})_model_states\.pt")
# Before version 0.3.8 there was no "_" before "optim_states".
_OPTIM = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,9})_mp_rank_(\d{1,9})_?optim_states\.pt"
)
_REFUSED = (
    (re.compile(r"layer_\d+_expert_\d+_.*|expp_rank_.*"), "a mixture of experts"),
    (re.compile(r"layer_\d+-.*model_states\.pt"), "pipeline stages"),
    (re.compile(r"offloaded_tensors"), "an optimizer offloaded to NVMe"),
)


class RankFile(msgspec.Struct, frozen=True):
    """A file of one tensor-parallel and, where that matters, data-parallel rank."""

    tp: int
    dp: int
    name: str


class StateFile(msgspec.Struct, frozen=True):
    """A file of a universal checkpoint: one state of one parameter."""

    parameter: str
    state: str
    name: str


class DeepSpeedFiles(msgspec.Struct, frozen=True, kw_only=True):
    """The files of one checkpoint; names are relative to its directory.

    Attributes
    ----------
    directory : str
        Absolute path of the directory that its tag names.
    tag : str
        Name of that directory.
    model, optim : tuple of RankFile
        In order of their ranks.
    universal : tuple of StateFile
        Those below ``zero/``; none in a checkpoint that is not universal.
    common : str or None
        What all states of a universal checkpoint share.
    """

    directory: str
    tag: str
    model: tuple[RankFile, ...]
    optim: tuple[RankFile, ...]
    universal: tuple[StateFile, ...] = ()
    common: str | None = None

    @property
    def names(self) -> list[str]:
        """All files that are read, in one order."""
        of_ranks = [file.name for file in (*self.model, *self.optim)]
        common = [self.common] if self.common else []
        return [*of_ranks, *(file.name for file in self.universal), *common]


def find_files(source: Path, tag: str | None) -> DeepSpeedFiles:
    """Return the files of a checkpoint.

    Parameters
    ----------
    source : Path
        What was given to ``save_checkpoint``, with a file `latest` in it, or the
        directory of one tag.
    tag : str, optional
        Which of several checkpoints; default what `latest` says.

    Raises
    ------
    CheckpointNotFoundError
        If there is none.
    IncompleteCheckpointError
        If two files are of one rank.
    ManifestError
        If it is of a kind that is not imported, or a name leaves the directory.
    """
    directory = _tag_directory(source, tag)
    names = _listed(directory)
    if _ZERO in names:
        return _universal(directory, names)
    for pattern, what in _REFUSED:
        found = next((name for name in names if pattern.fullmatch(name)), None)
        if found is not None:
            raise ManifestError(
                f"{directory} is of a training with {what} ({found!r}), which is not "
                "imported as it is; convert it with DeepSpeed's ds_to_universal.py and "
                "import that"
            )
    files = DeepSpeedFiles(
        directory=str(directory),
        tag=directory.name,
        model=_of_ranks(directory, names, _MODEL),
        optim=_of_ranks(directory, names, _OPTIM),
    )
    if not files.model:
        what = "no *_model_states.pt"
        raise (
            IncompleteCheckpointError(f"{directory} has {what}", path=str(directory))
            if files.optim
            else CheckpointNotFoundError(f"{directory} is no DeepSpeed one: {what}")
        )
    return files


def _tag_directory(source: Path, tag: str | None) -> Path:
    source = Path(os.path.abspath(source))
    if not source.is_dir():
        raise CheckpointNotFoundError(f"{source} is no directory")
    if tag is None:
        tag = _latest(source)
    if tag is None:
        return source
    directory = contained(source, tag)
    if not directory.is_dir():
        raise CheckpointNotFoundError(
            f"{directory} is no directory; the checkpoints there are "
            f"{sorted(path.name for path in source.iterdir() if path.is_dir())[:20]}"
        )
    return directory


def _latest(source: Path) -> str | None:
    for name in _LATEST:
        if (source / name).is_file():
            path = contained(source, name)
            content = read_small_file(path, _MOST_TAG_NBYTES)
            try:
                return content.decode().strip()
            except UnicodeDecodeError as error:
                raise ManifestError(f"{path} holds no name of a checkpoint") from error
    return None


def _listed(directory: Path) -> list[str]:
    with storage_errors("list", directory):
        return sorted(os.listdir(directory))


def _of_ranks(
    directory: Path, names: list[str], pattern: re.Pattern[str]
) -> tuple[RankFile, ...]:
    found: dict[tuple[int, int], str] = {}
    for name in names:
        match = pattern.fullmatch(name)
        if match is None:
            continue
        ranks = int(match[2]), int(match[1] or 0)
        if ranks in found:
            raise IncompleteCheckpointError(
                f"{directory} has both {found[ranks]} and {name} for one rank: files "
                "of two saves; remove those of one",
                path=str(directory),
            )
        found[ranks] = name
    return tuple(RankFile(tp, dp, name) for (tp, dp), name in sorted(found.items()))


def _universal(directory: Path, names: list[str]) -> DeepSpeedFiles:
    zero = contained(directory, _ZERO)
    states, common = [], None
    for parameter in _listed(zero):
        if parameter == _OPTIMIZER:
            common = f"{_ZERO}/{_OPTIMIZER}"
            continue
        folder = contained(directory, f"{_ZERO}/{parameter}")
        states += [
            StateFile(
                parameter, name.removesuffix(".pt"), f"{_ZERO}/{parameter}/{name}"
            )
            for name in _listed(folder)
            if name.endswith(".pt")
        ]
    model = _of_ranks(directory, names, _MODEL)
    if not states or not model:
        raise IncompleteCheckpointError(
            f"{directory} is a universal checkpoint, but has "
            f"{'no *_model_states.pt' if states else 'no parameters below zero/'}",
            path=str(directory),
        )
    return DeepSpeedFiles(
        directory=str(directory),
        tag=directory.name,
        model=model,
        optim=(),
        universal=tuple(states),
        common=common,
    )

"""Imports checkpoints of DeepSpeed; needs neither torch nor DeepSpeed.

Every storage is read by one rank, as the save writes it, and verified by the CRC-32
that torch wrote with it. Nothing of a pickle is executed.
"""

import logging
import os
from pathlib import Path
from typing import Any

import msgspec

from mpickpt.errors import CheckpointError, ManifestError
from mpickpt.interop.deepspeed.files import DeepSpeedFiles, find_files
from mpickpt.interop.deepspeed.state import ImportedState, imported_state
from mpickpt.interop.progress import Progress, watched
from mpickpt.interop.sources.torch_heads import gather_files
from mpickpt.parallel.collective import Conversation, Steps, conversations_of, run
from mpickpt.parallel.options import SaveOptions, SaveResult
from mpickpt.parallel.save import save_sharded

_logger = logging.getLogger(__name__)
_SHOWN = 10
# What a file raises whose values are of other types than DeepSpeed writes.
_MISFITS = (AttributeError, LookupError, TypeError, ValueError)


def deepspeed(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    tag: str | None = None,
    step: int | None = None,
    comm: Any = None,
    overwrite: bool = False,
    options: SaveOptions | None = None,
    progress: Progress | None = None,
) -> SaveResult:
    """Import a checkpoint of DeepSpeed: ZeRO 0, 1, 2 or 3, or a universal one.

    Parameters
    ----------
    src : path-like
        What was given to ``save_checkpoint``, or the directory of one tag.
    dst : path-like
        Directory of the new checkpoint.
    tag : str, optional
        Which of several checkpoints in `src`; default what its file `latest` says.
    step : int, optional
        Step of the new checkpoint; default the `global_steps` of the old one.
    comm : mpi4py.MPI.Intracomm, optional
        The ranks that import together; None is this process alone.
    overwrite : bool
        Replace a published checkpoint at `dst`.
    options : SaveOptions, optional
        How to write.
    progress : callable, optional
        Gets (bytes just read, bytes of all that this rank reads).

    Returns
    -------
    SaveResult

    Raises
    ------
    CheckpointNotFoundError
        `src` holds no checkpoint of DeepSpeed.
    IncompleteCheckpointError
        Files are missing, truncated, or not all of one save.
    CorruptShardError
        Bytes differ from the checksums that were written with them.
    ManifestError
        The checkpoint is of a kind that is not imported, or a pickle asks for what is
        not among what such checkpoints need.
    CheckpointError
        As `save_sharded`.

    Notes
    -----
    The new checkpoint holds, as far as the old one does:

    ``model``
        Parameters and buffers by name, in the type of the training; tied ones once.
        ZeRO 3 and universal checkpoints hold no such parameters: they are made of the
        masters by rounding, as DeepSpeed does when it loads.
    ``master``
        Masters of the trained parameters, by name.
    ``optimizer``
        ``state`` by name of the parameter, and ``param_groups``.
    ``extra``
        Learning-rate scheduler, loss scaler, counts, configuration, client state. What
        is neither a plain value nor an array is left out, with a warning.

    Collective. Memory stays below some hundred MiB a rank, however large the
    checkpoint; each storage is read by one rank.
    """
    timeout_s = None if options is None else options.timeout_s
    talk = conversations_of(comm, timeout_s).load
    imported = run(_described(talk, Path(src), tag))
    try:
        if talk.rank == 0:
            _warn(imported)
        return save_sharded(
            watched(imported.tree, progress),
            dst,
            step=imported.step if step is None else step,
            comm=comm,
            metadata={"imported": imported.about},
            overwrite=overwrite,
            options=options,
        )
    finally:
        imported.reading.close()


def _described(
    talk: Conversation, source: Path, tag: str | None
) -> Steps[ImportedState]:
    found = yield from talk.on_root(
        lambda: msgspec.msgpack.encode(find_files(source, tag)), "find the files"
    )
    files = msgspec.msgpack.decode(found, type=DeepSpeedFiles)
    opened = yield from gather_files(talk, Path(files.directory), files.names)

    def understood() -> ImportedState:
        try:
            return imported_state(files, opened, talk.rank, talk.size)
        except CheckpointError:  # some of ours are of these classes too
            raise
        except _MISFITS as error:
            raise ManifestError(
                f"{files.directory} is not as DeepSpeed writes it: "
                f"{type(error).__name__}: {error}"
            ) from error

    return (yield from talk.agree(understood, "understand"))


def _warn(imported: ImportedState) -> None:
    about = imported.about
    if about["left_out"]:
        _logger.warning(
            "import of %s leaves out what is neither a plain value nor an array, "
            "or has no place: %s",
            about["source"],
            _shortened(about["left_out"]),
        )
    if about["without_checksums"]:
        _logger.warning(
            "import of %s: these files were written without checksums "
            "(set_crc32_options(False)), so that damage in them CANNOT be seen: %s",
            about["source"],
            _shortened(about["without_checksums"]),
        )


def _shortened(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")

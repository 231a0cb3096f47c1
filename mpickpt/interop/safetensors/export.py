"""`mpickpt export CKPT --format safetensors -o DIR`: the files that hub loaders read.

One process goes through the shards, each once for each file that it writes, and holds
a few blocks; no torch and no safetensors library.
"""

import argparse
import contextlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from mpickpt.cli.copy_options import copy_progress
from mpickpt.cli.output import nbytes_text, print_line, print_warning
from mpickpt.cli.status import WHOLE, UsageError
from mpickpt.errors import IncompleteCheckpointError
from mpickpt.format.naming import parse_key
from mpickpt.interop.safetensors.choice import Choice, choose
from mpickpt.interop.safetensors.file import write_box
from mpickpt.interop.safetensors.float_casts import cast_floats, count_overflows
from mpickpt.interop.safetensors.layout import (
    INDEX_NAME,
    TensorFile,
    dump_index,
    plan_files,
)
from mpickpt.interop.safetensors.staged_files import StagedFiles
from mpickpt.storage.checkpoint_reader import Checkpoint, open_checkpoint
from mpickpt.storage.commit import make_directory
from mpickpt.storage.shard_file import ShardFile
from mpickpt.storage.small_file import names_in

_DEFAULT_FILE_NBYTES = 5 * 10**9
_SHOWN = 8
# Those by which loaders find a model.
_OF_A_MODEL = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


def run(options: argparse.Namespace) -> int:
    """Write the tensors that were asked for, and say so."""
    directory: Path = options.output
    with open_checkpoint(options.checkpoint) as checkpoint:
        patterns = [*(options.keys or []), *([options.key] if options.key else [])]
        choice = choose(checkpoint, patterns, options.dtype)
        max_nbytes = options.max_shard or _DEFAULT_FILE_NBYTES
        try:
            files = plan_files(choice.tensors, max_nbytes, choice.aliases)
        except ValueError as error:
            raise UsageError(str(error)) from error
        with _directory_of_model(directory, options.overwrite) as there:
            overflows = _write(checkpoint, choice, files, directory, there)
    for name, count in overflows.items():
        print_warning(
            f"{name}: {count} elements are too large for {options.dtype} and became "
            "infinite"
        )
    _report(directory, choice, files)
    return WHOLE


@contextlib.contextmanager
def _directory_of_model(directory: Path, overwrite: bool) -> Iterator[set[str]]:
    """Make the directory, or give the names of the model files that are in it.

    One that was made is removed again when the body fails.
    """
    is_new = not directory.exists()
    names = [] if is_new else names_in(directory)
    there = {name for name in names if _OF_A_MODEL.fullmatch(name)}
    if there and not overwrite:
        raise UsageError(f"{directory} holds {min(there)}; --overwrite replaces it")
    make_directory(directory)
    try:
        yield there
    except BaseException:
        if is_new:
            with contextlib.suppress(OSError):
                directory.rmdir()
        raise


def _write(
    checkpoint: Checkpoint,
    choice: Choice,
    files: list[TensorFile],
    directory: Path,
    there: set[str],
) -> Counter[str]:
    """Write and publish the files; return how many numbers a cast made infinite."""
    begun = checkpoint.manifest.checkpoint_id
    total = sum(tensor.nbytes for tensor in choice.tensors)
    overflows: Counter[str] = Counter()
    with (
        copy_progress(directory.name, total) as progress,
        StagedFiles(directory) as new,
    ):
        for file in files:
            with new.open(file.name, file.nbytes) as out:
                out.write_at(memoryview(file.head), 0)
                for nbytes in _fill(out, file, checkpoint, choice, overflows):
                    progress(nbytes)
        if checkpoint.manifest.checkpoint_id != begun:
            raise IncompleteCheckpointError(
                f"{checkpoint.path} was replaced meanwhile; export it again",
                path=str(checkpoint.path),
            )
        names = {file.name for file in files}
        if len(files) > 1:
            new.add(INDEX_NAME, dump_index(files, choice.aliases))
            names.add(INDEX_NAME)
        new.publish(last=INDEX_NAME, stale=sorted(there - names))
    return overflows


def _fill(
    out: ShardFile,
    file: TensorFile,
    checkpoint: Checkpoint,
    choice: Choice,
    overflows: Counter[str],
) -> Iterator[int]:
    """Write the tensors of one file; yield bytes as they are done."""
    keys = [parse_key(choice.keys[name]) for name in file.offsets]
    for key, box, elements in checkpoint.pieces(keys):
        tensor = choice.by_key[key]
        cast = cast_floats(elements, tensor.dtype)
        if cast is not elements and (count := count_overflows(elements, cast)):
            overflows[tensor.name] += count
        write_box(out, file.offsets[tensor.name], tensor.shape, box, cast)
        yield cast.nbytes


def _report(directory: Path, choice: Choice, files: list[TensorFile]) -> None:
    nbytes = nbytes_text(sum(file.nbytes for file in files))
    tensors, in_files = _counted(choice.tensors, "tensor"), _counted(files, "file")
    text = f"{directory}: {tensors}, {nbytes}, {in_files}"
    if choice.aliases:
        text += f"; tied, so noted only: {', '.join(sorted(choice.aliases)[:_SHOWN])}"
    if choice.n_values:
        text += f"; {choice.n_values} plain values left out"
    print_line(text)


def _counted(things: Sequence[object], word: str) -> str:
    return f"{len(things)} {word}{'s' * (len(things) != 1)}"

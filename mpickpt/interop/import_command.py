"""`mpickpt import KIND SRC DST`: another system's checkpoint as ours; also mpiexec."""

import argparse
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from mpickpt.cli.copy_options import copy_progress
from mpickpt.cli.output import nbytes_text, print_line
from mpickpt.cli.place_arguments import local_place
from mpickpt.cli.run_arguments import step
from mpickpt.cli.status import FAILED, USAGE, WHOLE, UsageError, status_of
from mpickpt.errors import CheckpointError
from mpickpt.format.naming import parse_step_directory
from mpickpt.interop.progress import Progress
from mpickpt.parallel.mpi_facts import is_launched
from mpickpt.parallel.options import SaveResult
from mpickpt.parallel.world import world

# Where each importer is; a function of its own name.
KINDS = {
    "deepspeed": ("mpickpt.interop.deepspeed.importer", "DeepSpeed: ZeRO, universal"),
    "dcp": ("mpickpt.interop.dcp.importer", "torch.distributed.checkpoint"),
    "nemo": ("mpickpt.interop.nemo.importer", "NeMo, Megatron-core dist checkpoints"),
}

_LOCAL = local_place("copy it first")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.description = (
        "Save a checkpoint that another system wrote as one of ours, on any number of "
        "ranks; under mpiexec each reads a share. Needs none of these systems. Nothing "
        "of the source is executed, and what is damaged, or not understood, is an "
        "error before anything is published."
    )
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    for name, (_, meaning) in KINDS.items():
        kind = kinds.add_parser(name, help=meaning, description=meaning)
        kind.add_argument("source", metavar="SRC", type=_LOCAL, help="directory")
        kind.add_argument(
            "target",
            metavar="DST",
            type=_LOCAL,
            help="directory of the new checkpoint, as RUN/step-0000000002",
        )
        kind.add_argument(
            "--step",
            metavar="N",
            type=step,
            help="step of the new checkpoint, by default the one in the name of DST, "
            "else what the source says",
        )
        _add_choices(kind, name)
        kind.add_argument(
            "--overwrite", action="store_true", help="replace a checkpoint at DST"
        )


def _add_choices(kind: argparse.ArgumentParser, name: str) -> None:
    """Declare what can be chosen of one kind of source only."""
    if name == "deepspeed":
        kind.add_argument(
            "--tag", metavar="TAG", help="which checkpoint, by default the latest"
        )
        return
    if name == "nemo":
        kind.add_argument(
            "--iteration",
            metavar="N",
            type=step,
            help="which checkpoint, by default the latest",
        )
    kind.add_argument(
        "--skip",
        metavar="PATTERN",
        action="append",
        default=[],
        help="leave out what the source calls so, as 'optim.*'; may be repeated",
    )


def run(options: argparse.Namespace) -> int:
    """Import on the ranks of this program, and say on rank 0 what came of it.

    Raises
    ------
    UsageError, CheckpointError
        On rank 0 only; the other ranks just end, with the same status.
    """
    comm = _ranks()
    rank = 0 if comm is None else comm.Get_rank()
    try:
        begin_s = time.monotonic()
        chosen = _step(options.target, options.step)
        with _shown(rank) as progress:
            result = _imported(options, chosen, comm, progress)
    except (UsageError, CheckpointError) as error:
        if rank == 0:
            raise
        return USAGE if isinstance(error, UsageError) else status_of(error)
    except BaseException:
        if comm is not None and comm.Get_size() > 1:
            # The other ranks may wait for this one, and would for ever.
            traceback.print_exc()
            comm.Abort(FAILED)
        raise
    if rank == 0:
        seconds = time.monotonic() - begin_s
        print_line(
            f"{result.path}: step {result.step}, {nbytes_text(result.nbytes)} "
            f"in {seconds:.1f} s"
        )
    return WHOLE


def _step(target: Path, chosen: int | None) -> int | None:
    """Return the step that was asked for; one of another name would seem damaged."""
    named = parse_step_directory(target.name)
    if named is not None and chosen not in (None, named):
        raise UsageError(f"{target} is no name for step {chosen}")
    return named if chosen is None else chosen


def _imported(
    options: argparse.Namespace,
    chosen: int | None,
    comm: Any,
    progress: Progress | None,
) -> SaveResult:
    home, _ = KINDS[options.kind]
    importer: Callable[..., SaveResult] = getattr(import_module(home), options.kind)
    more = {
        name: getattr(options, name)
        for name in ("tag", "iteration", "skip")
        if hasattr(options, name)
    }
    return importer(
        options.source,
        options.target,
        step=chosen,
        comm=comm,
        overwrite=options.overwrite,
        progress=progress,
        **more,
    )


def _ranks() -> Any:
    """Return the ranks of the job, None where no launcher has started any."""
    if not is_launched():
        return None
    try:
        return world()
    except (ImportError, RuntimeError) as error:
        raise UsageError(f"this was launched as an MPI program, but {error}") from error


@contextmanager
def _shown(rank: int) -> Iterator[Progress | None]:
    """Show how far rank 0 has come, which reads about as much as any other."""
    if rank:
        yield None
        return
    with ExitStack() as stack:
        advance: list[Callable[[int], None]] = []

        def progress(nbytes: int, total: int) -> None:
            if not advance:
                advance.append(stack.enter_context(copy_progress("import", total)))
            advance[0](nbytes)

        yield progress

"""`mpickpt doctor DIR`: what a place for checkpoints is like; also under mpiexec."""

import argparse
import errno
import os
import traceback
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from mpickpt.bench.ground import scratch_directory
from mpickpt.bench.ranks import Ranks
from mpickpt.cli.place_arguments import argument, place
from mpickpt.cli.status import FAILED, USAGE, WHOLE, UsageError, status_of
from mpickpt.doctor.alone import examine
from mpickpt.doctor.asking import LIMIT_S, Asking, leave
from mpickpt.doctor.report import print_report
from mpickpt.doctor.store import report_on_store
from mpickpt.doctor.together import examine_together
from mpickpt.doctor.visit import QUICK, THOROUGH, Visit
from mpickpt.errors import CheckpointError, StorageError
from mpickpt.parallel.launcher import split_launch
from mpickpt.parallel.mpi_facts import is_launched, launched_processes
from mpickpt.parallel.world import mpi_name, world
from mpickpt.planning.advice import advise
from mpickpt.planning.findings import Failure, Findings, SplitFound
from mpickpt.planning.units import parse_nbytes
from mpickpt.storage.commit import storage_errors
from mpickpt.storage.filesystem import is_directory
from mpickpt.storage.remote_path import RemotePath

_PREFIX = ".mpickpt-doctor-"
_QUICK_LIMIT_S = 20.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.description = (
        "Say what a directory is like as a place for checkpoints: its file system, "
        "what that does and how fast, and what to mind. Under mpiexec also what the "
        "nodes see of each other. What is written there is removed again. Exit status "
        "1 if checkpoints would fail or be lost there."
    )
    parser.add_argument(
        "directory", metavar="DIR", type=place, help="existing one, or a run's URL"
    )
    parser.add_argument(
        "--nbytes",
        metavar="SIZE",
        type=argument(parse_nbytes),
        help="of one checkpoint, as in 1TB: whether it fits, and how long it takes",
    )
    parser.add_argument(
        "--quick", action="store_true", help="measure less, in under 3 s"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Examine a directory and print, on rank 0, what was found.

    Raises
    ------
    UsageError, StorageError
        On rank 0: there is no such directory, or nothing can be written in it. The
        other ranks just end.
    """
    if isinstance(options.directory, RemotePath):
        if launched_processes()[2]:
            return WHOLE  # a store is the same for all ranks
        return report_on_store(
            options.directory, quick=options.quick, as_json=options.json
        )
    asking = Asking(_QUICK_LIMIT_S if options.quick else LIMIT_S)
    ranks = _ranks(asking)
    split = _split(ranks)
    if split is not None and launched_processes()[2]:
        # Another process of this launch says the same.
        return FAILED
    try:
        return _examine_and_print(options, ranks, split, asking)
    except (UsageError, CheckpointError) as error:
        if ranks is None or ranks.rank == 0:
            raise
        return USAGE if isinstance(error, UsageError) else status_of(error)
    except BaseException:
        if ranks is not None and ranks.size > 1:
            # The other ranks may wait for this one, and would for ever.
            traceback.print_exc()
            ranks.comm.Abort(FAILED)
        raise


def _examine_and_print(
    options: argparse.Namespace,
    ranks: Ranks | None,
    split: SplitFound | None,
    asking: Asking,
) -> int:
    with ExitStack() as stack:

        def make() -> Path:
            directory = asking.ask("directory", lambda: _made(options, stack))
            if directory is None:
                raise _unreadable(options.directory, asking.failures)
            return directory

        work = make() if ranks is None else ranks.from_root(make)
        findings = _findings(options, ranks, work, asking)
        status = WHOLE
        if findings is not None:
            findings = replace(findings, split=split)
            advice = advise(findings)
            status = FAILED if any(said.is_grave for said in advice) else WHOLE
            print_report(findings, advice, as_json=options.json)
        has_hung = asking.has_hung
        if ranks is not None:
            status = ranks.from_root(lambda: status)
            has_hung = any(ranks.all_of(has_hung))
        if has_hung:
            leave(status)
    return status


def _findings(
    options: argparse.Namespace, ranks: Ranks | None, work: Path, asking: Asking
) -> Findings | None:
    """Return what was found, None on all ranks but 0."""
    visit = Visit(
        directory=options.directory,
        work=work,
        asking=asking,
        effort=QUICK if options.quick else THOROUGH,
        checkpoint_nbytes=options.nbytes,
        n_ranks=None if ranks is None else ranks.size,
    )
    if ranks is None:
        found = examine(visit, None)
        return replace(found, failures=tuple(asking.failures))
    found = ranks.from_root(lambda: examine(visit, mpi_name()))
    together = examine_together(ranks, visit, found.tried.sync_16mib)
    failures = [one for some in ranks.all_of(asking.failures) for one in some]
    if ranks.rank:
        return None
    return replace(found, ranks=together, failures=tuple(dict.fromkeys(failures)))


def _ranks(asking: Asking) -> Ranks | None:
    """Return the ranks of the job, None where no launcher has started any."""
    if not is_launched():
        return None
    try:
        return Ranks(world())
    except (ImportError, RuntimeError) as error:
        asking.note("MPI", None, str(error))
        return None


def _split(ranks: Ranks | None) -> SplitFound | None:
    """Return the launch that MPI does not join into one world, if it is one."""
    variable, size, _ = launched_processes()
    if ranks is None:
        is_split = size > 1 and is_launched()
    else:
        is_split = split_launch(ranks.comm, os.environ) is not None
    return SplitFound(variable=variable, n_processes=size) if is_split else None


def _made(options: argparse.Namespace, stack: ExitStack) -> Path:
    directory = options.directory
    if not is_directory(directory):
        raise UsageError(f"{directory} is not a directory; make it first")
    with storage_errors("write in", directory):
        return stack.enter_context(scratch_directory(directory, _PREFIX))


def _unreadable(directory: Path, failures: list[Failure]) -> StorageError:
    failure = failures[-1]
    is_named = str(directory) in failure.text
    return StorageError(
        failure.text if is_named else f"{directory}: {failure.text}",
        errno=getattr(errno, failure.errno or "", None),
        path=str(directory),
    )

"""Starts programs under mpiexec and never waits for them without end."""

import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

REPOSITORY = Path(__file__).resolve().parent.parent
OTHER_PYTHON = REPOSITORY / ".venv-openmpi/bin/python"
SHARED_MEMORY = Path("/dev/shm")
YOUNG_S = 30.0

# Ranks wait by sleeping, so the suites under mpiexec may share few cores.
MPI_ENVIRONMENT = {
    "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",
    "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_btl": "self,sm",
    "OMPI_MCA_pml": "ob1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a program under mpiexec ended."""

    returncode: int
    output: str
    timed_out: bool


def pythons() -> list[str]:
    """Return the interpreters to test under: this one, and one with another MPI.

    The other one is what ``MPICKPT_TEST_OTHER_PYTHON`` says, nothing where that is
    empty, else the one that tests/run.sh has made.
    """
    made = str(OTHER_PYTHON) if OTHER_PYTHON.exists() else ""
    other = os.environ.get("MPICKPT_TEST_OTHER_PYTHON", made)
    return [sys.executable, *([other] if other else [])]


def mpiexec_of(python: str) -> str:
    """Return the mpiexec that belongs to an interpreter's environment."""
    beside = Path(python).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    assert found, "no mpiexec: install an MPI, or the mpich extra"
    return found


def start(
    arguments: Sequence[str],
    *,
    size: int,
    python: str = sys.executable,
    environ: Mapping[str, str] | None = None,
    output: IO[str] | int = subprocess.PIPE,
    flags: Sequence[str] = (),
    prefix: Sequence[str] = (),
) -> "subprocess.Popen[str]":
    """Start ``python arguments`` on `size` ranks, in a process group of its own.

    `flags` are mpiexec's; `prefix` is a command that starts mpiexec.
    """
    paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [*prefix, mpiexec_of(python), *flags, "-n", str(size), python, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=REPOSITORY,
        env={
            **MPI_ENVIRONMENT,
            **os.environ,
            "TMPDIR": _scratch_folder(),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            **(environ or {}),
        },
        start_new_session=True,
    )


def _scratch_folder() -> str:
    """Return a new folder for the launcher's own files, gone when the tests end.

    Open MPI's mpiexec makes /tmp/ompi.<its pid>. One that was killed leaves it there,
    and a later one that is given the same pid again cannot start.
    """
    folder = tempfile.mkdtemp(prefix="mpi-", dir="/tmp")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def remove_orphaned_shared_memory() -> None:
    """Remove the MPI segments in /dev/shm that no process maps: killed ranks' ones."""
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            mapped |= {line.split()[-1] for line in maps.open() if "/dev/shm/" in line}
        except OSError:
            continue
    for segment in SHARED_MEMORY.glob("mpich_shm_*"):
        # A new one may belong to a rank that is about to map it.
        with suppress(FileNotFoundError):
            age_s = time.time() - segment.stat().st_mtime
            if str(segment) not in mapped and age_s > YOUNG_S:
                segment.unlink()


def finish(program: "subprocess.Popen[str]", timeout_s: float) -> Outcome:
    """Wait for the program; kill its whole process group when it takes too long."""
    try:
        output, _ = program.communicate(timeout=timeout_s)
        timed_out = False
    except subprocess.TimeoutExpired:
        timed_out = True
        kill(program)
        output, _ = program.communicate(timeout=30)
    return Outcome(returncode=program.returncode, output=output, timed_out=timed_out)


def kill(program: "subprocess.Popen[str]") -> None:
    """Kill mpiexec and every process that it started, sessions of their own too."""
    for pid in [*_descendants(program.pid), program.pid]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in task.read_text().split()]
        except OSError:
            continue
        for child in children:
            found += [*_descendants(child), child]
    return found

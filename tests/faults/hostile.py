"""Runs that an enemy wrote, with every digest right; fuzzed, and watched while read.

Two programs at a time read forged runs in every way (programs/hostile_reads.py): only
our errors come out, memory and time stay bounded, nothing outside the run is opened or
changed, and h5py is never imported. atheris looks for more, where it is installed.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from mpickpt import read_manifest, step_path
from tests.faults.hostile_forgeries import CASES
from tests.faults.hostile_fuzzing import TARGETS, fuzz
from tests.faults.hostile_readers import NEW
from tests.faults.matrix import Case, Verdict
from tests.mpi_launch import REPOSITORY

PROGRAM = str(REPOSITORY / "tests/faults/programs/hostile_reads.py")
N_PROGRAMS = 2
BATCH_TIMEOUT_S = 600
TRACED_TIMEOUT_S = 120
TRACED = "traced by strace"
BLOCKED = "without h5py"
# What a Python interpreter and numpy open of their own.
_SYSTEM = (
    "/proc/",
    "/sys/",
    "/dev/",
    "/etc/",
    "/lib",
    "/usr/",
    "/bin/",
    str(Path.home() / ".cache"),
)


class HostileSuite:
    """Forged checkpoints and control files."""

    name = "hostile"

    def why_not(self) -> str | None:
        """Return None: what is missing leaves out single cases, which is said."""
        return None

    def cases(self) -> Sequence[Case]:
        """Return the forgeries, and the targets of the fuzzer."""
        return [
            *(Case(name=one.name, in_ci=one.in_ci) for one in CASES),
            Case(name=TRACED, in_ci=True),
            Case(name=BLOCKED, in_ci=True),
            *(Case(name=f"atheris/{target}") for target in TARGETS),
            *(
                Case(name=f"atheris in short/{target}", in_ci=True)
                for target in TARGETS
            ),
        ]

    def run(
        self, cases: Sequence[Case], folder: Path
    ) -> Iterator[tuple[Case, Verdict]]:
        """Run cases; the forgeries are shared out over two programs."""
        base = folder / "base"
        _python([PROGRAM, "--save", str(base)], timeout_s=120, check=True)
        by_name = {case.name: case for case in cases}
        forged = [one.name for one in CASES if one.name in by_name]
        fuzzed = [name for name in by_name if name.startswith("atheris")]
        for name, verdict in _read_forged(forged, base, folder):
            yield by_name[name], verdict
        if TRACED in by_name:
            yield by_name[TRACED], _traced(base, folder / "traced")
        if BLOCKED in by_name:
            yield by_name[BLOCKED], _blocked(base)
        for name, verdict in fuzz(fuzzed, base, folder):
            yield by_name[name], verdict


SUITE = HostileSuite()


def _python(
    arguments: Sequence[str],
    *,
    timeout_s: float,
    check: bool = False,
    before: Sequence[str] = (),
) -> "subprocess.CompletedProcess[str]":
    paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [*before, sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout_s,
        check=check,
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )


def _read_forged(
    names: Sequence[str], base: Path, folder: Path
) -> Iterator[tuple[str, Verdict]]:
    """Share cases out; start anew behind a case that a program died of."""
    shares = [list(names[number::N_PROGRAMS]) for number in range(N_PROGRAMS)]
    told: dict[str, Verdict] = {}
    turn = 0
    while any(shares):
        turn += 1
        running = []
        for number, share in enumerate(shares):
            if share:
                own = folder / f"{number}-{turn}"
                own.mkdir()
                running.append((number, own, _start_reading(share, base, own)))
        for number, own, program in running:
            told |= _finished(shares[number], own, program)
            shares[number] = [name for name in shares[number] if name not in told]
            shutil.rmtree(own, ignore_errors=True)
    for name in names:
        yield name, told[name]


def _start_reading(
    names: Sequence[str], base: Path, own: Path
) -> "subprocess.Popen[bytes]":
    (own / "chosen.json").write_text(json.dumps(names))
    arguments = [base, own, own / "results.jsonl", own / "chosen.json"]
    paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    with (own / "errors").open("wb") as errors:
        return subprocess.Popen(
            [sys.executable, PROGRAM, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )


def _finished(
    names: Sequence[str], own: Path, program: "subprocess.Popen[bytes]"
) -> dict[str, Verdict]:
    """Return the verdicts of one program; the case that it died of has one too."""
    try:
        program.wait(BATCH_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        program.kill()
        program.wait()
    results = own / "results.jsonl"
    lines = results.read_text().splitlines() if results.exists() else []
    told = {}
    begun = names[0]
    for head, *rest in map(json.loads, lines):
        if head == "begin":
            begun = rest[0]
        else:
            told[head] = Verdict(**rest[0])
    if program.returncode and begun not in told:
        errors = (own / "errors").read_text(errors="replace")
        told[begun] = Verdict(
            hung=f"exit status {program.returncode}: {errors[-2500:]}"
        )
    for name in names if not program.returncode else ():
        told.setdefault(name, Verdict(hung="the program ended without running it"))
    return told


_READ_ALL = """
import sys
from pathlib import Path
{before}
from tests.faults.hostile_readers import READ_ONLY
from mpickpt import CheckpointError
run = Path(sys.argv[1])
sys.stderr.write("BEGIN\\n")
sys.stderr.flush()
for name, read in READ_ONLY.items():
    if name in {left_out!r}:
        continue
    try:
        read(run)
    except CheckpointError as error:
        if not {may_refuse}:
            raise
"""
_READER_IMPORTS = """
import mpickpt, numpy, tests.ranks_as_threads
from mpickpt import load_sharded, open_checkpoint
"""


def _traced(base: Path, folder: Path) -> Verdict:
    """Let the kernel tell which files a process opens that reads a forged run."""
    strace = shutil.which("strace")
    if strace is None:
        print("hostile: not traced, for there is no strace", flush=True)
        return Verdict()
    run, outside, log = folder / "run", folder / "outside", folder / "log"
    shutil.copytree(base / "run", run)
    outside.mkdir()
    checkpoint = step_path(run, NEW)
    record = read_manifest(checkpoint).shards[1]
    shutil.move(checkpoint / record.path, outside / "moved.h5")
    (checkpoint / record.path).symlink_to(outside / "moved.h5")
    (run / ".mpickpt").symlink_to(outside)
    code = _READ_ALL.format(before="", left_out=(), may_refuse=True)
    finished = _python(
        ["-c", code, str(run)],
        timeout_s=TRACED_TIMEOUT_S,
        before=[strace, "-f", "-qq", "-e", "trace=%file", "-o", str(log)],
    )
    if finished.returncode:
        return Verdict(wrong_error=finished.stderr[-1500:])
    opened = re.compile(r'(?:open|openat|openat2|creat)\((?:AT_FDCWD, )?"([^"]+)"(.*)')
    exported = str(folder / "exported.npy")
    homes = {sys.prefix, sys.base_prefix, str(REPOSITORY), str(run), exported}
    allowed = (*_SYSTEM, *homes, *map(os.path.realpath, homes))
    calls = [call for line in log.open() if (call := opened.search(line))]
    if not any(str(run) in call[1] for call in calls):
        return Verdict(rubbish="strace saw nothing of the run")
    followed = [
        call[1]
        for call in calls
        if (call[1].startswith("/") and not call[1].startswith(allowed))
        or (call[1].endswith(record.path) and "O_NOFOLLOW" not in call[2])
        or "/.mpickpt/" in call[1]
    ]
    return Verdict(rubbish=f"opened {followed[:5]}" if followed else "")


def _blocked(base: Path) -> Verdict:
    """Read where the HDF5 library cannot be imported."""
    before = "sys.modules['h5py'] = None"
    # The readers here import what saves too, which needs it.
    before += "\nimport mpickpt"
    before += "\nmpickpt.CheckpointManager = mpickpt.save_sharded = None"
    code = _READ_ALL.format(before=before, left_out=(), may_refuse=False)
    finished = _python(["-c", code, str(base / "run")], timeout_s=120)
    return Verdict(wrong_error=finished.stderr[-1500:] if finished.returncode else "")

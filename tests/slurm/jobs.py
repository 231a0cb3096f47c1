"""Submits the batch scripts of slurm/ and watches the jobs; never waits for ever."""

import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.slurm.cluster import COMMAND_TIMEOUT_S, Cluster
from tests.slurm.templates import REPOSITORY, edited

STEPS = 60
EVERY = 10
JOB_TIMEOUT_S = 90.0
AT_PACE = "tests/slurm/programs/train_at_pace.py"
IN_TIERS = "tests/slurm/programs/train_in_tiers.py"
EXAMPLE = "examples/train_gpt.py"
SRUN = ("srun", "--mpi=pmi2")
MPIEXEC = ("mpiexec",)

_ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}


class Job:
    """One batch job, or one task of an array.

    Attributes
    ----------
    job_id : str
        As commands take it.
    run_dir : Path
        Where its checkpoints go.
    """

    def __init__(self, cluster: Cluster, job_id: str, log: Path, run_dir: Path) -> None:
        self.job_id = job_id
        self.run_dir = run_dir
        self._cluster = cluster
        self._log = log

    @property
    def log(self) -> str:
        """What the job has printed so far."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    @property
    def state(self) -> str:
        """What Slurm says of the job."""
        return self.shown("JobState")

    def shown(self, name: str) -> str:
        """Return one thing that ``scontrol show job`` says."""
        text = self._cluster.run("scontrol", "show", "job", "--oneliner", self.job_id)
        return re.search(rf"\b{name}=(\S*)", text)[1]

    def nodes(self) -> list[str]:
        """Return the names of the nodes that the job has, or had."""
        expand = ("scontrol", "show", "hostnames", self.shown("NodeList"))
        return self._cluster.run(*expand).split()

    def signal(self, name: str) -> None:
        """Send the batch script a signal, as Slurm does when the time is nearly up."""
        self._cluster.run("scancel", f"--signal={name}", "--batch", self.job_id)

    def cancel(self) -> None:
        """Cancel the job, as a person does."""
        self._cluster.run("scancel", self.job_id)

    def wait_for(
        self, pattern: str, *, count: int = 1, timeout_s: float = JOB_TIMEOUT_S
    ) -> None:
        """Wait for so many matches in the log; fail if the job ends before."""
        end = time.monotonic() + timeout_s
        while True:
            has_ended = self.state in _ENDED
            if len(re.findall(pattern, self.log, re.M)) >= count:
                return
            if has_ended or time.monotonic() > end:
                pytest.fail(f"not in the log: {pattern}\n{self.account()}")
            time.sleep(0.1)

    def wait_until_ended(self, timeout_s: float = JOB_TIMEOUT_S) -> str:
        """Return the state in which the job ended."""
        end = time.monotonic() + timeout_s
        while (state := self.state) not in _ENDED:
            if time.monotonic() > end:
                pytest.fail(f"still {state} after {timeout_s} s\n{self.account()}")
            time.sleep(0.2)
        return state

    def account(self) -> str:
        """Return all that may tell what went wrong."""
        shown = self._cluster.run("scontrol", "show", "job", self.job_id, check=False)
        return f"{self._cluster.logs()}\n{shown}\n{self.log}"

    def digest(self) -> str | None:
        """Return the digest of the final state."""
        found = re.findall(r"^digest (\w{64})$", self.log, re.M)
        return found[0] if len(found) == 1 else None

    def resumed_from(self) -> list[int]:
        """Return the steps from which the starts of the job went on."""
        return self._numbers(r"^resumed from step (\d+)")

    def stopped_after(self) -> list[int]:
        """Return the steps after which the job stopped because it was told to."""
        return self._numbers(r"^stopped after step (\d+)")

    def _numbers(self, pattern: str) -> list[int]:
        return [int(number) for number in re.findall(pattern, self.log, re.M)]


class Submitter:
    """Submits jobs from a directory in which the repository seems to lie."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self._cluster = cluster
        self._directory = directory
        self._jobs: list[Job] = []
        for name in ("examples", "tests"):
            (directory / name).symlink_to(REPOSITORY / name)

    def __call__(
        self,
        name: str,
        *options: str,
        launcher: Sequence[str] = SRUN,
        run: str = "run",
        pause_s: float = 0.05,
        hanging_step: int = -1,
        tiers: Sequence[str] = (),
        flushes: bool = False,
    ) -> Job:
        """Submit a template that trains at a pace; of an array, return task 0.

        Parameters
        ----------
        name : str
            Of the template.
        *options : str
            For sbatch.
        launcher : sequence of str
            How it starts its ranks.
        run : str
            Name of the run directory.
        pause_s, hanging_step
            See `programs/train_at_pace.py`.
        tiers : sequence of str
            First arguments of `programs/train_in_tiers.py`, to train in tiers.
        flushes : bool
            Whether the script copies what the program has left in the first tier.
        """
        program = [f"{{local}}/{AT_PACE}" if name == "staging" else AT_PACE]
        program += [str(pause_s), str(hanging_step)]
        if tiers:
            program = [IN_TIERS, *tiers, str(pause_s)]
        script = self._directory / f"{name}.sbatch"
        run_dir = self._directory / run
        script.write_text(
            edited(
                name,
                run_dir=run_dir / "{task}" if name == "array" else run_dir,
                program=[
                    *("python", "-m", "mpi4py", *program),
                    *(f"--steps={STEPS}", f"--every={EVERY}"),
                ],
                launcher=launcher,
                staged=[AT_PACE, EXAMPLE] if name == "staging" else [],
                local_run=tiers[0] if flushes else "",
            )
        )
        job_id = self._sbatch([*options, str(script)])
        if name == "array":
            self._jobs += [self._job(name, job_id, run_dir, task) for task in (0, 1)]
            return self._jobs[-2]
        self._jobs.append(self._job(name, job_id, run_dir))
        return self._jobs[-1]

    @property
    def last(self) -> Job:
        """The job, or task of an array, that was submitted last."""
        return self._jobs[-1]

    def end_all(self) -> None:
        """Cancel what still runs, and wait for that."""
        for job in self._jobs:
            if job.state not in _ENDED:
                self._cluster.run("scancel", job.job_id, check=False)
        for job in self._jobs:
            job.wait_until_ended()

    def _job(self, name: str, job_id: str, run_dir: Path, task: int = -1) -> Job:
        if task >= 0:
            job_id, run_dir = f"{job_id}_{task}", run_dir / str(task)
        log = self._directory / f"{name}.{job_id}.log"
        return Job(self._cluster, job_id, log, run_dir)

    def _sbatch(self, arguments: Sequence[str]) -> str:
        done = subprocess.run(
            ["sbatch", "--parsable", *arguments],
            cwd=self._directory,
            env=self._cluster.environ,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

"""Power loss at every call of a save, a removal and a rejection: real, and by a model.

- ``cut/FILE SYSTEM/LOG/SCENARIO/CALL``: ranks are threads, the disk is loop-mounted,
  and its power is cut just before the call; LOG: whether the log is lost with it.
- ``mpi/…``: the same with MPI processes.
- ``model/SCENARIO/CALL``: every disk that POSIX allows if the power goes there.
- ``killed/SCENARIO/CALL``: the process is killed there, the next start saves, and then
  the power goes: every disk that POSIX allows.
- ``lie/FILE SYSTEM/SYNCS``: syncs that do nothing.
- ``loss/FILE/WHAT``: a file of a published checkpoint is empty, or zeros, or in part.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.faults.matrix import Case, Verdict
from tests.faults.power_loss_cuts import cut_once, make_image
from tests.faults.power_loss_disk import (
    FILE_SYSTEMS,
    enter_own_namespace,
    why_no_disk,
)
from tests.faults.power_loss_lies import FILES, LIES, LOSSES, lie, lose_of_file
from tests.faults.power_loss_models import (
    END,
    SIZE,
    judge_killed,
    judge_moments,
    labels_of,
    moments_of,
    record,
)
from tests.faults.power_loss_processes import Hung, in_child, side_by_side
from tests.faults.power_loss_scenarios import SCENARIOS
from tests.mpi_launch import finish, start

AT_ONCE = min(2, os.cpu_count() or 1)
CASE_TIMEOUT_S = 200.0
GROUP_TIMEOUT_S = 400.0

MPI_SCENARIOS = ("sync", "async", "overwrite")
KILLED = ("first", "sync", "overwrite", "manager", "rewind")
STARTS = 2

# Of the short part: one in so many.
CI_CUTS = {("xfs", "lose"): 12, ("xfs", "keep"): 36, ("ext4", "lose"): 36}
CI_KILLED = 24
CI_MPI = 18

PROGRAM = Path(__file__).parent / "programs" / "power_loss_ranks.py"

Answer = list[tuple[str, Verdict]]


@dataclass(frozen=True, slots=True)
class PowerLoss:
    """The suite."""

    name: str = "power_loss"

    def why_not(self) -> str | None:
        """Return what this machine lacks for the suite, or None."""
        return why_no_disk()

    def cases(self) -> Sequence[Case]:
        """Return all cases, always in the same order."""
        return _cases()

    def run(
        self, cases: Sequence[Case], folder: Path
    ) -> Iterator[tuple[Case, Verdict]]:
        """Run these cases; the quick ones two at a time."""
        left = {case.name: case for case in cases}
        yield from self._images_made(left, folder)
        jobs = list(_jobs(list(left), folder))
        for (_, *call), answer in side_by_side(
            _do, jobs, timeout_s=GROUP_TIMEOUT_S, at_once=AT_ONCE
        ):
            names = call[0]
            if isinstance(answer, Exception):
                answer = [(name, _failed(answer)) for name in names if name in left]
            for name, verdict in answer:
                yield left.pop(name), verdict

    def _images_made(
        self, left: dict[str, Case], folder: Path
    ) -> Iterator[tuple[Case, Verdict]]:
        """Make the disks to begin with; what cannot be made fails its cases."""
        needed: dict[tuple[str, str], list[str]] = {}
        for name in left:
            kind, *words = name.split("/")
            if kind in ("cut", "mpi", "lie"):
                scenario = "sync" if kind == "lie" else words[2]
                needed.setdefault((words[0], scenario), []).append(name)
        calls = [
            (_image(folder, *disk), disk[0], SCENARIOS[disk[1]], SIZE)
            for disk in needed
        ]
        made = side_by_side(
            make_image, calls, timeout_s=CASE_TIMEOUT_S, at_once=AT_ONCE
        )
        for call, answer in made:
            if isinstance(answer, Exception):
                for name in needed[call[1], call[2].name]:
                    yield left.pop(name), _failed(answer)


SUITE = PowerLoss()


@cache
def _cases() -> tuple[Case, ...]:
    found = [case for scenario in SCENARIOS for case in _cases_of(scenario)]
    for file_system in FILE_SYSTEMS:
        for words in LIES:
            found.append(Case(name=f"lie/{file_system}/{words}", in_ci=True))
    for file in FILES:
        for loss in LOSSES:
            in_ci = file in ("shard1", "manifest")
            found.append(Case(name=f"loss/{file}/{loss}", in_ci=in_ci))
    return tuple(found)


def _cases_of(scenario: str) -> Iterator[Case]:
    labels = (*labels_of(scenario), END)
    one_in = {f"cut/{fs}/{flag}": every for (fs, flag), every in CI_CUTS.items()}
    one_in["model"] = 1
    if scenario in KILLED:
        one_in["killed"] = CI_KILLED
    if scenario in MPI_SCENARIOS:
        one_in["mpi/xfs/lose"] = CI_MPI
    for kind, every in one_in.items():
        for number, label in enumerate(labels):
            if label != END or kind != "killed":
                name = f"{kind}/{scenario}/{label}"
                yield Case(name=name, in_ci=number % every == 0)


Job = tuple[Callable[..., Answer], list[str], Any]


def _jobs(names: Sequence[str], folder: Path) -> Iterator[Job]:
    """Yield what is done in one process each: function, names, and the folder."""
    groups: dict[str, list[str]] = {}
    for name in names:
        kind, *words = name.split("/")
        if kind in ("model", "killed"):
            groups.setdefault(f"{kind}/{words[0]}", []).append(name)
        elif kind in ("mpi", "loss"):
            groups.setdefault(kind, []).append(name)
        else:
            groups[name] = [name]
    # The long ones first, so that both processors have something to do at the end.
    for key in sorted(groups, key=lambda key: key.split("/")[0] in ("cut", "lie")):
        yield _RUNNERS[key.split("/")[0]], groups[key], folder


def _do(run: Callable[..., Answer], names: list[str], folder: Path) -> Answer:
    return run(names, folder)


def _run_cut(names: list[str], folder: Path) -> Answer:
    (name,) = names
    _, file_system, flag, scenario, label = name.split("/", 4)
    image = _image(folder, file_system, scenario)
    return [(name, cut_once(image, file_system, flag, scenario, label, SIZE))]


def _run_lie(names: list[str], folder: Path) -> Answer:
    (name,) = names
    _, file_system, words = name.split("/")
    image = _image(folder, file_system, "sync")
    return [(name, lie(image, file_system, "lose", words, SIZE))]


def _run_loss(names: list[str], _folder: Path) -> Answer:
    calls = [(name, *name.split("/")[1:]) for name in names]
    return [
        (name, in_child(lose_of_file, file, loss, SIZE, timeout_s=CASE_TIMEOUT_S))
        for name, file, loss in calls
    ]


def _run_model(names: list[str], _folder: Path) -> Answer:
    scenario = names[0].split("/")[1]
    recording = in_child(record, scenario, timeout_s=CASE_TIMEOUT_S)
    places = moments_of(recording)
    labels = [name.split("/", 2)[2] for name in names]
    gone = [label for label in labels if label not in places]
    moments = sorted(
        ((label, places[label]) for label in labels if label in places),
        key=lambda moment: moment[1],
    )
    judged = judge_moments(scenario, recording, moments, STARTS)
    answer = [(f"model/{scenario}/{label}", v) for label, (v, _) in judged.items()]
    for label in gone:
        verdict = Verdict(silent="no such call was made")
        answer.append((f"model/{scenario}/{label}", verdict))
    return answer


def _run_killed(names: list[str], _folder: Path) -> Answer:
    answer = []
    for name in names:
        _, scenario, label = name.split("/", 2)
        try:
            verdict = in_child(judge_killed, scenario, label, timeout_s=CASE_TIMEOUT_S)
        except (RuntimeError, Hung) as error:
            verdict = _failed(error)
        answer.append((name, verdict))
    return answer


def _run_mpi(names: list[str], folder: Path) -> Answer:
    enter_own_namespace()
    cases = []
    for name in names:
        _, file_system, flag, scenario, label = name.split("/", 4)
        image = str(_image(folder, file_system, scenario))
        cases.append(
            {
                "name": name,
                "file_system": file_system,
                "flag": flag,
                "scenario": scenario,
                "label": label,
                "image": image,
            }
        )
    work = Path(tempfile.mkdtemp(prefix="mpi-", dir=folder))
    (work / "cases.json").write_text(json.dumps(cases))
    arguments = [str(PROGRAM), str(work / "cases.json"), str(work)]
    outcome = finish(start(arguments, size=SIZE), GROUP_TIMEOUT_S - 20)
    told = [
        json.loads(line.removeprefix("verdict "))
        for line in outcome.output.splitlines()
        if line.startswith("verdict ")
    ]
    answer = [(name, Verdict(**words)) for name, words in told]
    for name in names[len(answer) :]:
        ended = "hung" if outcome.timed_out else f"ended: {outcome.output[-1000:]}"
        answer.append((name, Verdict(hung=f"the MPI program {ended}")))
    return answer


_RUNNERS: dict[str, Callable[..., Answer]] = {
    "cut": _run_cut,
    "lie": _run_lie,
    "loss": _run_loss,
    "model": _run_model,
    "killed": _run_killed,
    "mpi": _run_mpi,
}


def _image(folder: Path, file_system: str, scenario: str) -> Path:
    return folder / f"{file_system}-{scenario}.img"


def _failed(error: Exception) -> Verdict:
    if isinstance(error, Hung):
        return Verdict(hung=str(error))
    return Verdict(lost=f"the case itself failed: {error}")

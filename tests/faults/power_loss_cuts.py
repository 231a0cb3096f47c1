"""Cuts the power of a real file system at one call of a scenario, and looks."""

import errno
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mpickpt import StorageError
from tests.faults.matrix import Verdict
from tests.faults.power_loss_checks import Ending, go_on, load_value, look
from tests.faults.power_loss_disk import (
    KEEP_LOG,
    LOSE_LOG,
    Disk,
    copy_sparse,
    enter_own_namespace,
)
from tests.faults.power_loss_processes import in_child
from tests.faults.power_loss_recording import Call, Hooks, act_as_rank
from tests.faults.power_loss_scenarios import SCENARIOS, Scenario, make_run
from tests.ranks_as_threads import run_ranks

FLAGS = {"lose": LOSE_LOG, "keep": KEEP_LOG}
ACT_TIMEOUT_S = 60.0
END = "end"


def make_image(image: Path, file_system: str, scenario: Scenario, size: int) -> None:
    """Make a disk with the run of a scenario on it, all of it durable."""
    enter_own_namespace()
    disk = Disk(image.with_suffix(".d"), file_system)
    with disk.mounted() as root:
        make_run(scenario, root / "run", size)
    copy_sparse(disk.image, image)


def cut_once(
    image: Path, file_system: str, flag: str, name: str, label: str, size: int
) -> Verdict:
    """Act on a copy of a disk, cut the power just before a call, and look."""
    logging.disable(logging.CRITICAL)
    enter_own_namespace()
    scenario = SCENARIOS[name]
    disk = Disk(image.with_suffix(".d"), file_system, image)
    with disk.mounted():
        ending = in_child(
            act_until_cut, disk, scenario, FLAGS[flag], label, size, timeout_s=90
        )
    with disk.mounted() as root:
        verdict = judge(scenario, root / "run", ending, size)
    return verdict


def act_until_cut(
    disk: Disk, scenario: Scenario, flag: int, label: str, size: int
) -> Ending:
    """Do a scenario on ranks as threads; the power goes just before a call."""
    cuts = Cuts(disk, flag, label)
    stages, reached = [0], [0]
    run = disk.root / "run"

    def act(comm: Any) -> None:
        act_as_rank(comm.rank)
        scenario.act(run, comm, promise)

    def promise(stage: int) -> None:
        # Nobody hears of it afterwards. What lives on hears too much: after such a cut
        # XFS answers a sync of a directory with success.
        reached.append(stage)
        if not cuts.is_cut:
            stages.append(stage)

    with Hooks(disk.root, cuts.around).installed():
        if scenario.is_alone:
            outcomes = [_attempt(lambda: scenario.act(run, None, promise))]
        else:
            outcomes = run_ranks(size, act, ACT_TIMEOUT_S)
    if label == END:
        disk.cut_power(flag)
    elif not cuts.is_cut:
        raise AssertionError(f"no call {label} was made: {outcomes}")
    return ending_of(stages, reached, outcomes)


class Cuts:
    """Cuts the power before the call with a label."""

    def __init__(self, disk: Disk, flag: int, label: str) -> None:
        self.is_cut = False
        self._disk = disk
        self._flag = flag
        self._label = label

    def around(self, call: Call, make: Callable[[], Any]) -> Any:
        """Make a call, on a dead disk from the labelled one on."""
        if call.label == self._label:
            self.is_cut = True
            self._disk.cut_power(self._flag)
        return make()


def judge(scenario: Scenario, run: Path, ending: Ending, size: int) -> Verdict:
    """Look at what is left; let the run go on if that is as it should be."""
    verdict = look(scenario, run, ending, lambda path: load_value(path, size))
    return _with_errors(
        verdict if verdict.complaints else go_on(scenario, run, size), ending
    )


def ending_of(
    stages: Sequence[int], reached: Sequence[int], outcomes: Sequence[Any]
) -> Ending:
    """Return how the ranks fared, as values that another process understands."""
    wrong = ""
    errors = [o for o in outcomes if isinstance(o, BaseException)]
    hung = [str(error) for error in errors if isinstance(error, TimeoutError)]
    if 0 < len(errors) < len(outcomes):
        wrong = f"some ranks returned, others raised: {outcomes}"
    elif len({(type(error), str(error)) for error in errors}) > 1:
        wrong = f"ranks raised different errors: {errors}"
    for error in errors[:1]:
        wrong = wrong or _wrong_error(error)
    return Ending(
        stage=max(stages),
        reached=max(reached),
        failures=tuple(
            (str(o), getattr(o, "outcome", None)) if o in errors else None
            for o in outcomes
        ),
        wrong_error=wrong,
        hung="; ".join(hung),
    )


def _wrong_error(error: BaseException) -> str:
    if not isinstance(error, StorageError):
        return f"{type(error).__name__} instead of a StorageError: {error}"
    if (
        error.errno not in (errno.EIO, errno.EROFS)
        or not error.path
        or error.path not in str(error)
    ):
        return f"the error does not name errno and path: {error!r}"
    return ""


def _attempt(call: Callable[[], None]) -> BaseException | None:
    try:
        call()
    except BaseException as error:
        return error
    return None


def _with_errors(verdict: Verdict, ending: Ending) -> Verdict:
    return Verdict(
        lost=verdict.lost,
        silent=verdict.silent,
        hung=verdict.hung or ending.hung,
        wrong_error=verdict.wrong_error or ending.wrong_error,
        rubbish=verdict.rubbish,
    )

"""MPI program: one start of a run that saves, prunes, goes back, fails and is killed.

``soak_run.py FOLDER PLAN``; the plan is that of `soak_plan.Start`, as JSON. What was
published is noted in ``FOLDER/journal``, durably and outside the run; what is wrong
in ``FOLDER/complaints``.
"""

import errno
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpi4py import MPI

from mpickpt import (
    CheckpointError,
    CheckpointManager,
    EverySteps,
    KeepEvery,
    KeepLast,
    Preemption,
    SaveOptions,
    StorageError,
    save_sharded,
    step_path,
)
from mpickpt.parallel import ground
from tests.faults.programs.soak_faults import CALLS, die, die_later, die_while_pruning
from tests.faults.programs.soak_faults import failing as failing_call
from tests.faults.soak_plan import Start, rubbish_in
from tests.faults.soak_state import PureState

COMM = MPI.COMM_WORLD
FOLDER, PLAN = Path(sys.argv[1]), Start(**json.loads(sys.argv[2]))
RUN = FOLDER / "run"
MOST_CYCLES_AFTER = 60
LONGEST_DELAY_S = 0.25

state = PureState(COMM.rank, COMM.size)
dice = random.Random(PLAN.seed)  # thrown alike on all ranks
last_saved: list[int] = []
pinned: list[int] = []


def opened(name: str) -> int:
    # Synchronous, and open before any call is made to fail.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_DSYNC
    return os.open(FOLDER / name, flags, 0o666)


NOTES = {name: opened(name) for name in ("journal", "complaints", "cycles")}


def append(name: str, text: str) -> None:
    os.write(NOTES[name], f"{text}\n".encode())


def complain(column: str, text: str) -> None:
    append("complaints", json.dumps([column, f"rank {COMM.rank}: {text}"]))


def keep_journal() -> None:
    """Note each step that was published, once that is over and done."""
    publish = ground.publish_checkpoint

    def publish_noted(directory: Path, manifest: Any) -> bytes:
        content = publish(directory, manifest)
        append("journal", f"published {manifest.step}")
        return content

    if COMM.rank == 0:
        ground.publish_checkpoint = publish_noted


def note(text: str) -> None:
    if COMM.rank == 0:
        append("journal", text)
    COMM.barrier()


def check_restored(restored: Any) -> None:
    if restored.rejected:
        complain("lost", f"passed over {restored.rejected}")
    size = restored.manifest.world_size
    problem = state.problem(restored.state, restored.step, size)
    if problem:
        complain("silent", problem)
    state.advance(restored.step)


def resume(manager: CheckpointManager) -> None:
    """Go on from the newest, which is not older than what was told to be published."""
    state.wipe()
    restored = manager.restore_latest(reshard=True, verify=PLAN.verify, required=False)
    reached = None if restored is None else restored.step
    if PLAN.floor is not None and (reached is None or reached < PLAN.floor):
        complain("lost", f"restored {reached}, though {PLAN.floor} was published")
    if restored is not None:
        check_restored(restored)
        last_saved[:] = [restored.step]


class Cycles:
    """What a run does, one thing a cycle."""

    def __init__(self, manager: CheckpointManager) -> None:
        self.manager = manager
        self.step = manager.next_step - 1

    def advance(self) -> None:
        self.step += 1
        state.advance(self.step)

    def save(self, *, wait: bool = False) -> None:
        self.advance()
        if wait:
            self.manager.save(self.step, wait=True)
        else:
            self.manager.save_if_due(self.step)
        last_saved[:] = [self.step]

    def save_and_wait(self) -> None:
        self.save(wait=True)

    def restore(self) -> None:
        state.wipe()
        verify = dice.choice(["sha256", "crc32"])
        restored = self.manager.restore_latest(verify=verify, reshard=True)
        if restored is None or [restored.step] != last_saved:
            complain("lost", f"restored {restored and restored.step} of {last_saved}")
        check_restored(restored)
        self.step = restored.step

    def rewind(self) -> None:
        self.manager.wait()
        steps = COMM.bcast(self.manager.steps())
        target = dice.choice(steps[-3:])
        note(f"rewound {target}")
        state.wipe()
        check_restored(self.manager.rewind(target, reshard=True))
        self.step = target
        last_saved[:] = [target]

    def pin(self) -> None:
        self.manager.wait()
        self.manager.pin(last_saved[0])
        pinned.append(last_saved[0])
        if len(pinned) > 2 and COMM.rank == 0:
            self.manager._keeper.run.unpin(pinned[-3])
        COMM.barrier()

    def overwrite(self) -> None:
        self.manager.wait()
        path = step_path(RUN, last_saved[0])
        state.advance(last_saved[0])
        save_sharded(state.tree(), path, step=last_saved[0], comm=COMM, overwrite=True)

    def fail(self) -> None:
        """Save while a call fails on one rank; all ranks say the same, or nothing."""
        self.manager.wait()
        self.advance()
        victim, call = dice.randrange(COMM.size), dice.choice(CALLS)
        turn, number = dice.randrange(12), dice.choice([errno.ENOSPC, errno.EIO])
        waits, said = dice.random() < 0.5, ""
        turn = turn if COMM.rank == victim else -1
        with failing_call(call, turn, number) as hits:
            try:
                self.manager.save(self.step, wait=waits)
                self.manager.wait()
                last_saved[:] = [self.step]
            except CheckpointError as error:
                said = repr((type(error).__name__, str(error)))
                if not isinstance(error, StorageError) or error.errno != number:
                    complain("wrong_error", f"{call} {number} gave {said}")
        self._compare(said, victim, hits)

    def _compare(self, said: str, victim: int, hits: list[str]) -> None:
        everyone = COMM.allgather(said)
        if len(set(everyone)) > 1:
            complain("wrong_error", f"ranks say different things: {everyone}")
        if said and COMM.size > 1 and f"rank {victim} on" not in said:
            complain("wrong_error", f"rank {victim} failed, not named by {said}")
        if said and not COMM.bcast(hits, root=victim):
            complain("wrong_error", f"nothing failed, but {said}")
        if said and last_saved:
            published = COMM.bcast(self.manager.steps()[-1:])
            last_saved[:] = published  # of an unknown outcome, too

    def any_of(self) -> Callable[[], None]:
        weights = {
            self.save: 50,
            self.save_and_wait: 12,
            self.restore: 10,
            self.rewind: 6,
            self.pin: 4,
            self.overwrite: 6,
            self.fail: 10,
        }
        return dice.choices(list(weights), list(weights.values()))[0]


def arm() -> None:
    """Set up how this start ends; on the rank that it is done to."""
    here = COMM.rank == PLAN.victim
    delay_s = random.Random(f"{PLAN.seed} {COMM.rank}").uniform(0, LONGEST_DELAY_S)
    if PLAN.end == "all" or (PLAN.end == "rank" and here):
        die_later(delay_s)
    elif PLAN.end in ("SIGTERM", "SIGUSR1") and here:
        die_later(delay_s, getattr(signal, PLAN.end))
    elif PLAN.end == "tree" and COMM.rank == 0:
        (FOLDER / "moment").touch()
    elif PLAN.end.startswith("prune"):
        place = PLAN.end.partition("-")[2]
        if COMM.rank == (PLAN.victim if place == "files" else 0):
            die_while_pruning(place)
    elif PLAN.end == "body" and here:
        raise RuntimeError("the body failed")


def go_on_until_the_end(cycles: Cycles) -> None:
    if PLAN.end == "close":
        return
    for _ in range(MOST_CYCLES_AFTER):
        cycles.save(wait=dice.random() < 0.3)
        time.sleep(0.005)
        if cycles.manager.should_stop:
            return
    if PLAN.end == "tree":
        time.sleep(60)
    if COMM.rank == PLAN.victim or PLAN.end == "all":
        die()


def main() -> int:
    keep_journal()
    preemption = Preemption(install=True)
    with CheckpointManager(
        RUN,
        COMM,
        state=state.tree,
        keep=KeepLast(3) | KeepEvery(20),
        when=EverySteps(1),
        options=SaveOptions(timeout_s=60),
        progress=PLAN.progress,
        preemption=preemption,
    ) as manager:
        resume(manager)
        cycles = Cycles(manager)
        cycles.save_and_wait()
        if COMM.rank == 0:
            for problem in rubbish_in(RUN):
                complain("rubbish", problem)
        COMM.barrier()
        for _ in range(PLAN.n_cycles - 1):
            cycles.any_of()()
            if COMM.rank == 0:
                append("cycles", "1")
        arm()
        go_on_until_the_end(cycles)
    if PLAN.end.startswith("SIG") and manager.steps()[-1] != cycles.step:
        complain("lost", f"stopped at {cycles.step}, saved is {manager.steps()[-1]}")
    return manager.exit_code


sys.exit(main())

"""Decides at each step, alike on all ranks, whether to save and whether to stop."""

import time

import msgspec

from mpickpt.parallel.conversation import Conversation
from mpickpt.parallel.preemption import Preemption
from mpickpt.parallel.step_agreement import Flags, StepAgreement
from mpickpt.planning.interval import Progress, Trigger
from mpickpt.storage.run_directory import RunDirectory

HALT_LOOK_S = 1.0
COST_MARGIN = 1.5


class Decision(msgspec.Struct, frozen=True):
    """What all ranks do at a step."""

    is_due: bool
    stop: bool
    halted: bool
    has_failed: bool


class Watch:
    """Watches clock, signals, wall time and halt file from step to step.

    Parameters
    ----------
    talk : Conversation
        For the agreement of each step, and nothing else.
    when : Trigger or None
        When a save is due; None: never by itself.
    preemption : Preemption
        Of this process.
    run : RunDirectory
        Where the halt file lies; rank 0 looks.
    """

    def __init__(
        self,
        talk: Conversation,
        when: Trigger | None,
        preemption: Preemption,
        run: RunDirectory,
    ) -> None:
        self._is_root = talk.rank == 0
        self._when = when
        self._preemption = preemption
        self._run = run
        self._agreement = StepAgreement(talk)
        self._now_s: float | None = None
        self._last_step: int | None = None
        self._last_time_s: float | None = None
        self._interval_s = 0.0
        self._own_cost_s = 0.0
        self._cost_s = 0.0
        self._is_halted = False
        self._looked_s = float("-inf")

    def decide(self, step: int, *, has_failed: bool) -> Decision:
        """Return what to do at a step, by what was agreed at the step before.

        Parameters
        ----------
        step : int
            The step that was just done.
        has_failed : bool
            Whether this rank knows that the save in the background has failed.

        Notes
        -----
        Collective: every rank calls it equally often.
        """
        agreed = self._agreement.exchange(self._own_flags(has_failed))
        if agreed is not None:
            self._now_s = agreed.now_s
            self._cost_s = agreed.save_cost_s
            if self._last_time_s is None:
                self._last_time_s = agreed.now_s
        return Decision(
            is_due=self._when is not None and self._when.is_due(self._progress(step)),
            stop=agreed is not None and (agreed.preempted or agreed.halted),
            halted=agreed is not None and agreed.halted,
            has_failed=agreed is not None and agreed.has_failed,
        )

    def saved(self, step: int, cost_s: float) -> None:
        """Note that a step was saved, and for how long the program waited."""
        if self._now_s is not None and self._last_time_s is not None:
            self._interval_s = self._now_s - self._last_time_s
            self._last_time_s = self._now_s
        self._last_step = step
        self._own_cost_s = cost_s

    def restored(self, step: int) -> None:
        """Note that the run goes on from a step."""
        self._last_step = step

    def finish(self) -> None:
        """Complete the agreement that is under way; collective."""
        self._agreement.finish()

    def _own_flags(self, has_failed: bool) -> Flags:
        return Flags(
            now_s=time.monotonic() if self._is_root else 0.0,
            preempted=self._preemption.is_requested or self._ends_soon(),
            halted=self._is_root and self._looks_halted(),
            has_failed=has_failed,
            save_cost_s=self._own_cost_s,
        )

    def _ends_soon(self) -> bool:
        """Tell whether the wall time is too short for an interval and a save."""
        if not self._is_root:
            return False
        needed_s = self._interval_s + COST_MARGIN * self._cost_s
        return self._preemption.time_left_s() < needed_s

    def _looks_halted(self) -> bool:
        now_s = time.monotonic()
        if now_s - self._looked_s >= HALT_LOOK_S:
            self._looked_s = now_s
            self._is_halted = self._run.is_halted
        return self._is_halted

    def _progress(self, step: int) -> Progress:
        return Progress(
            step=step,
            now_s=self._now_s or 0.0,
            last_step=self._last_step,
            last_time_s=self._last_time_s or 0.0,
            save_cost_s=self._cost_s or None,
        )

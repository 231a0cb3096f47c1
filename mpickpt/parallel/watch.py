"""Decides at each step, alike on all ranks, whether to save and whether to stop."""

import logging
import time

import msgspec

from mpickpt.errors import StorageError
from mpickpt.parallel.conversation import Conversation
from mpickpt.parallel.preemption import Preemption
from mpickpt.parallel.step_agreement import Flags, StepAgreement
from mpickpt.planning.interval import Progress, Trigger
from mpickpt.storage.halt_file import HaltFile

log = logging.getLogger(__name__)

HALT_LOOK_S = 1.0
COST_MARGIN = 1.5
# What the last save may take, with its steps, while none was measured.
UNKNOWN_COST_S = 30.0


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
    halt_file : HaltFile
        Rank 0 looks for it.
    """

    def __init__(
        self,
        talk: Conversation,
        when: Trigger | None,
        preemption: Preemption,
        halt_file: HaltFile,
    ) -> None:
        self._is_root = talk.rank == 0
        self._when = when
        self._preemption = preemption
        self._halt_file = halt_file
        self._agreement = StepAgreement(talk)
        self._agreed: Flags | None = None
        self._is_stale = False
        self._last_step: int | None = None
        self._own_cost_s = 0.0
        # Of rank 0, on its clock.
        self._went_on_s = time.monotonic()
        self._looked_s = self._went_on_s
        self._step_s = 0.0
        self._interval_s = 0.0
        self._is_halted = False
        self._looked_for_halt_s = float("-inf")

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
        agreed = self._agreement.exchange(self._own_flags(step, has_failed))
        due = self._when is not None and self._when.is_due(self._progress(step, agreed))
        self._agreed, self._is_stale = agreed, False
        return Decision(
            is_due=due,
            stop=agreed is not None and (agreed.preempted or agreed.halted),
            halted=agreed is not None and agreed.halted,
            has_failed=agreed is not None and agreed.has_failed,
        )

    def saved(self, step: int, cost_s: float) -> None:
        """Note that a step was saved, and for how long the program waited."""
        now_s = time.monotonic()
        self._interval_s = now_s - cost_s - self._went_on_s
        self._own_cost_s = cost_s
        self._goes_on(step, now_s)

    def restored(self, step: int) -> None:
        """Note that the run goes on from a step."""
        self._goes_on(step, time.monotonic())

    def finish(self) -> None:
        """Complete the agreement that is under way; collective."""
        self._agreement.finish()

    def _goes_on(self, step: int, now_s: float) -> None:
        self._last_step = step
        self._went_on_s = self._looked_s = now_s
        # What was posted at this step does not know of the save yet.
        self._is_stale = True

    def _own_flags(self, step: int, has_failed: bool) -> Flags:
        now_s = time.monotonic()
        self._step_s, self._looked_s = now_s - self._looked_s, now_s
        if self._is_root and self._ends_soon():
            self._preemption.request()
        return Flags(
            now_s=now_s if self._is_root else 0.0,
            preempted=self._preemption.is_requested_at(step),
            halted=self._is_root and self._looks_halted(now_s),
            has_failed=has_failed,
            save_cost_s=self._own_cost_s,
            went_on_s=self._went_on_s if self._is_root else 0.0,
        )

    def _ends_soon(self) -> bool:
        """Tell whether the wall time is too short for an interval and a save.

        An interval is at least the two steps that it takes to agree on a stop.
        """
        cost_s = 0.0 if self._agreed is None else self._agreed.save_cost_s
        cost_s = COST_MARGIN * cost_s if cost_s else UNKNOWN_COST_S
        interval_s = max(self._interval_s, 2 * self._step_s)
        return self._preemption.time_left_s() < interval_s + cost_s

    def _looks_halted(self, now_s: float) -> bool:
        if now_s - self._looked_for_halt_s >= HALT_LOOK_S:
            self._looked_for_halt_s = now_s
            try:
                self._is_halted = self._halt_file.exists
            except StorageError as error:  # no reason to fail, least of all alone
                log.warning("cannot look for a halt: %s", error)
        return self._is_halted

    def _progress(self, step: int, agreed: Flags | None) -> Progress:
        if agreed is None:
            return Progress(
                step=step, now_s=0.0, last_step=self._last_step, last_time_s=0.0
            )
        return Progress(
            step=step,
            now_s=agreed.went_on_s if self._is_stale else agreed.now_s,
            last_step=self._last_step,
            last_time_s=agreed.went_on_s,
            save_cost_s=agreed.save_cost_s or None,
        )

"""Agrees from step to step on what concerns all ranks, at the cost of one Iallreduce.

A reduction is posted at step k and completed at step k+1, so hardly a step waits, and
all ranks decide on the same completed values. (Acting on whether a reduction happens
to be complete would stop ranks at different steps.)
"""

from typing import Any

import msgspec
import numpy as np

from mpickpt.parallel.conversation import Conversation
from mpickpt.parallel.waiting import run

PHASE = "step"

_WIDTH = 6


class Flags(msgspec.Struct, frozen=True):
    """What ranks tell each other at a step; of all ranks, the largest value counts.

    Attributes
    ----------
    now_s : float
        Clock of rank 0, in seconds; 0 elsewhere.
    preempted : bool
        A signal came, or the wall time runs out.
    halted : bool
        Somebody asks the run to stop for good.
    has_failed : bool
        The save in the background has failed.
    save_cost_s : float
        What the last save cost the program, in seconds.
    went_on_s : float
        When rank 0 went on training after the last save or restore, on its clock; 0
        elsewhere.
    """

    now_s: float = 0.0
    preempted: bool = False
    halted: bool = False
    has_failed: bool = False
    save_cost_s: float = 0.0
    went_on_s: float = 0.0


class StepAgreement:
    """One reduction under way between two steps.

    Notes
    -----
    All ranks call `exchange` equally often. Not thread-safe.
    """

    def __init__(self, talk: Conversation) -> None:
        self._talk = talk
        self._sent = np.zeros(_WIDTH)
        self._agreed = np.zeros(_WIDTH)
        self._reduction: Any = None

    def exchange(self, own: Flags) -> Flags | None:
        """Return what was agreed at the step before, and post what is so now.

        Returns
        -------
        Flags or None
            The same on all ranks; None at the first call.
        """
        agreed = self._complete()
        self._sent[:] = (
            own.now_s,
            own.preempted,
            own.halted,
            own.has_failed,
            own.save_cost_s,
            own.went_on_s,
        )
        self._reduction = self._talk.reduce_max(self._sent, self._agreed)
        return agreed

    def finish(self) -> Flags | None:
        """Complete the reduction that is under way, if there is one."""
        return self._complete()

    def _complete(self) -> Flags | None:
        if self._reduction is None:
            return None
        with self._talk.translated(PHASE):
            is_done = self._reduction.done()
        if not is_done:
            run(self._talk.complete(self._reduction, PHASE))
        self._reduction = None
        now_s, preempted, halted, has_failed, *times_s = self._agreed.tolist()
        return Flags(now_s, preempted > 0, halted > 0, has_failed > 0, *times_s)

"""When a save is due."""

import math

import numpy as np
import pytest

from mpickpt import EveryMinutes, EverySteps, YoungDaly
from mpickpt.planning.interval import FIRST_SAVE_S, AnyOf, Progress


def progress(step=7, seconds=0.0, last_step=None, cost=None):
    return Progress(
        step=step,
        now_s=1000 + seconds,
        last_step=last_step,
        last_time_s=1000.0,
        save_cost_s=cost,
    )


@pytest.mark.parametrize(
    ("step", "last_step", "is_due"),
    [
        (0, None, False),
        (9, None, False),
        (10, None, True),
        (10, 10, False),
        (20, 10, True),
    ],
)
def test_every_steps_goes_by_multiples(step, last_step, is_due):
    asked = progress(step=step, last_step=last_step)

    assert EverySteps(10).is_due(asked) is is_due


def test_every_minutes_counts_from_the_last_save():
    rule = EveryMinutes(0.5)

    assert not rule.is_due(progress(seconds=29.9))
    assert rule.is_due(progress(seconds=30))
    assert not rule.is_due(progress(seconds=30, last_step=7))


def test_either_rule_makes_a_save_due():
    rule = EverySteps(10) | EveryMinutes(1) | YoungDaly(1)

    assert rule == AnyOf((EverySteps(10), EveryMinutes(1), YoungDaly(1)))
    assert rule.is_due(progress(step=10))
    assert rule.is_due(progress(step=9, seconds=60))
    assert not rule.is_due(progress(step=9, seconds=59))


@pytest.mark.parametrize(
    "make",
    [
        lambda: EverySteps(0),
        lambda: EverySteps(1.5),
        lambda: EveryMinutes(0),
        lambda: EveryMinutes(math.inf),
        lambda: YoungDaly(-1),
        lambda: YoungDaly(math.nan),
    ],
)
def test_rule_that_makes_no_sense_is_refused(make):
    with pytest.raises(ValueError, match="expected"):
        make()


def test_rule_joins_rules_only():
    with pytest.raises(TypeError):
        EverySteps(1) | 3


def test_young_daly_saves_after_a_minute_to_learn_the_cost():
    rule = YoungDaly(24)

    assert not rule.is_due(progress(seconds=FIRST_SAVE_S - 1))
    assert rule.is_due(progress(seconds=FIRST_SAVE_S))


def test_young_daly_is_due_when_its_interval_has_passed():
    rule = YoungDaly(24)
    interval_s = rule.interval_s(10)

    assert interval_s == pytest.approx(math.sqrt(2 * 10 * 24 * 3600), rel=0.01)
    assert not rule.is_due(progress(seconds=interval_s - 1, cost=10))
    assert rule.is_due(progress(seconds=interval_s, cost=10))


def test_young_daly_stays_sensible_at_the_ends():
    rule = YoungDaly(1)

    assert rule.interval_s(0) == 0
    assert rule.interval_s(7200) == rule.interval_s(1e9) == 3600
    assert rule.interval_s(7199) == pytest.approx(3600, rel=0.5)


def lost_fraction(interval_s, cost_s, uptimes_s, restart_s):
    """Return the share of the time that is no progress, over many failures.

    Each time the job is up it trains and saves in turn; what was trained since the
    last finished save is lost with the failure.
    """
    n_saves = np.floor(uptimes_s / (interval_s + cost_s))
    return 1 - n_saves.sum() * interval_s / (uptimes_s + restart_s).sum()


@pytest.mark.parametrize("cost_s", [1, 30, 300, 1200, 3600])
def test_young_daly_loses_hardly_more_time_than_the_best_interval(cost_s):
    mtbf_hours, seed = 2, 20240607
    rng = np.random.default_rng(seed)
    uptimes_s = rng.exponential(3600 * mtbf_hours, size=200_000)
    chosen_s = YoungDaly(mtbf_hours).interval_s(cost_s)

    def lost(interval_s):
        return lost_fraction(interval_s, cost_s, uptimes_s, restart_s=120)

    best = min(lost(chosen_s * factor) for factor in np.geomspace(0.2, 5, 81))

    assert lost(chosen_s) <= 1.02 * best


def test_young_daly_finds_its_interval_step_by_step():
    rule, cost_s, step_s = YoungDaly(1), 20.0, 7.0
    now_s, last_s, cost, saved_after = 0.0, 0.0, None, []

    for step in range(1, 2000):
        now_s += step_s
        asked = Progress(
            step=step, now_s=now_s, last_step=None, last_time_s=last_s, save_cost_s=cost
        )
        if rule.is_due(asked):
            saved_after.append(now_s - last_s)
            now_s += cost_s
            last_s, cost = now_s, cost_s

    assert saved_after[0] == pytest.approx(FIRST_SAVE_S, abs=step_s)
    expected = rule.interval_s(cost_s)
    assert all(expected <= gap < expected + step_s for gap in saved_after[1:])

"""Which checkpoints stay, and why."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpickpt import KeepBest, KeepEvery, KeepLast
from mpickpt.planning.retention import (
    Candidate,
    KeepAny,
    parse_keep,
    plan_retention,
    plan_room,
)

METRICS = st.dictionaries(
    st.sampled_from(["loss", "acc"]),
    st.floats() | st.integers() | st.none() | st.text(max_size=2) | st.booleans(),
)
CANDIDATES = st.lists(
    st.builds(
        Candidate,
        step=st.integers(0, 10**12),
        is_pinned=st.booleans(),
        is_good=st.booleans(),
        metrics=METRICS,
        nbytes=st.integers(0, 100),
    ),
    unique_by=lambda candidate: candidate.step,
    max_size=12,
)
RULES = st.one_of(
    st.integers(1, 4),
    st.builds(KeepLast, st.integers(1, 4)),
    st.builds(KeepEvery, st.integers(1, 5)),
    st.builds(
        KeepBest,
        st.integers(1, 3),
        st.sampled_from(["loss", "acc"]),
        st.sampled_from(["min", "max"]),
    ),
)
KEEPS = RULES | st.builds(lambda a, b: parse_keep(a) | b, RULES, RULES)


def reasons(candidates, keep):
    return {v.step: v.reason for v in plan_retention(candidates, keep) if v.keep}


def steps(*numbers, **fields):
    return [Candidate(step=number, **fields) for number in numbers]


def newest_good(candidates):
    good = [c.step for c in candidates if c.is_good] or [c.step for c in candidates]
    return max(good)


@given(CANDIDATES, KEEPS)
def test_pinned_and_newest_good_are_always_kept(candidates, keep):
    verdicts = plan_retention(candidates, keep)

    kept = {verdict.step for verdict in verdicts if verdict.keep}
    assert [v.step for v in verdicts] == sorted(c.step for c in candidates)
    assert {c.step for c in candidates if c.is_pinned} <= kept
    assert not candidates or newest_good(candidates) in kept


@given(CANDIDATES, KEEPS)
def test_what_was_kept_is_kept_again(candidates, keep):
    kept = set(reasons(candidates, keep))

    left = [candidate for candidate in candidates if candidate.step in kept]

    assert set(reasons(left, keep)) == kept


@given(CANDIDATES, KEEPS, st.randoms())
def test_order_of_listing_does_not_matter(candidates, keep, random):
    shuffled = random.sample(candidates, len(candidates))

    assert plan_retention(shuffled, keep) == plan_retention(candidates, keep)


@given(CANDIDATES.filter(bool))
def test_keep_one_never_leaves_zero(candidates):
    assert reasons(candidates, 1)


@given(CANDIDATES, RULES, RULES)
def test_joined_rules_keep_what_either_keeps(candidates, a, b):
    joined = parse_keep(a) | parse_keep(b)

    kept = set(reasons(candidates, joined))

    assert kept == set(reasons(candidates, a)) | set(reasons(candidates, b))


@given(CANDIDATES, KEEPS, st.integers(0, 500), st.integers(0, 500))
def test_room_is_made_by_the_fewest_and_never_by_the_last_good(
    candidates, keep, needed, free
):
    plan = plan_room(candidates, keep, needed_nbytes=needed, free_nbytes=free)

    size = {candidate.step: candidate.nbytes for candidate in candidates}
    freed = [size[step] for step in plan.remove]
    pinned = {candidate.step for candidate in candidates if candidate.is_pinned}
    assert not pinned & set(plan.remove)
    assert not candidates or newest_good(candidates) not in plan.remove
    if plan.is_enough:
        assert free + sum(freed) >= needed
        assert not freed or free + sum(freed[:-1]) < needed
    else:
        assert plan.remove == ()


def test_last_are_those_of_the_highest_steps():
    assert reasons(steps(1000, 20, 3, 100), 2) == {
        100: "among the last 2",
        1000: "among the last 2",
    }


def test_reasons_of_all_rules_are_told():
    candidates = [Candidate(step=1000, is_pinned=True), *steps(1001)]

    assert reasons(candidates, KeepLast(2) | KeepEvery(1000)) == {
        1000: "pinned, among the last 2, multiple of 1000",
        1001: "among the last 2",
    }


def test_newest_good_one_outlives_newer_ones_of_unknown_state():
    candidates = steps(1, 2) + steps(3, 4, is_good=False)

    verdicts = plan_retention(candidates, 1)

    assert [(v.step, v.keep, v.reason) for v in verdicts] == [
        (1, False, "no rule keeps it"),
        (2, True, "newest good one"),
        (3, False, "no rule keeps it"),
        (4, True, "the last"),
    ]


def test_newest_stays_when_none_is_known_to_be_good():
    candidates = steps(1, 2, is_good=False)

    assert reasons(candidates, KeepEvery(1000)) == {2: "newest one"}


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        (KeepBest(2, "loss"), {3, 4}),
        (KeepBest(1, "loss", "max"), {1}),
        (KeepBest(1, "absent"), set()),
    ],
)
def test_best_goes_by_the_metric_and_later_wins(rule, kept):
    losses = [0.9, 0.2, 0.1, 0.2, float("nan"), True, "low", None]
    candidates = [
        Candidate(step=step, metrics={"loss": loss}, is_good=False)
        for step, loss in enumerate(losses, 1)
    ]

    assert set(reasons(candidates, rule)) - {8} == kept


def test_room_takes_first_what_no_rule_keeps_then_the_oldest():
    candidates = [
        Candidate(step=step, nbytes=10, is_pinned=step == 2) for step in range(1, 6)
    ]

    def removed(needed):
        plan = plan_room(
            candidates, KeepEvery(1000) | 2, needed_nbytes=needed, free_nbytes=0
        )
        return plan.remove

    assert removed(0) == ()
    assert removed(20) == (1, 3)
    assert removed(30) == (1, 3, 4)


def test_nothing_is_removed_when_it_would_not_be_enough():
    plan = plan_room(steps(1, 2, nbytes=10), 1, needed_nbytes=35, free_nbytes=5)

    assert (plan.remove, plan.is_enough, plan.missing_nbytes) == ((), False, 20)


def test_int_means_the_last_and_rules_join():
    assert parse_keep(3) == KeepLast(3)
    assert 3 | KeepEvery(10) == KeepLast(3) | KeepEvery(10)
    assert KeepLast(1) | 2 | KeepEvery(3) == KeepAny(
        (KeepLast(1), KeepLast(2), KeepEvery(3))
    )


@pytest.mark.parametrize("keep", [None, "3", 1.5, True])
def test_keep_of_another_type_is_refused(keep):
    with pytest.raises(TypeError, match="KeepLast"):
        parse_keep(keep)


@pytest.mark.parametrize(
    "make",
    [
        lambda: parse_keep(0),
        lambda: KeepEvery(0),
        lambda: KeepBest(0, "x"),
        lambda: KeepBest(1, "x", "best"),
        lambda: KeepLast(2.0),
    ],
)
def test_rule_that_makes_no_sense_is_refused(make):
    with pytest.raises(ValueError, match="expected"):
        make()

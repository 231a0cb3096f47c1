import math
from dataclasses import replace

import pytest

from mpickpt.planning.cost import (
    GIGABIT_LINK_BPS,
    Job,
    advice,
    cost_of,
    gather_seconds,
    nbytes_said,
    overhead_of,
    seconds_said,
    shards_seconds,
)

HOUR = 3600.0
TB = 10**12
HEADLINE = Job(nbytes=TB, ranks=64, mtbf_s=4 * HOUR)


@pytest.mark.parametrize(
    ("job", "shards_s", "in_turn_s", "overlapped_s"),
    [
        # 1 TB at 70 MB/s a rank: 1e12 / (64 x 7e7); 63/64 TB at 117.7 MB/s arrive.
        (HEADLINE, 223.2, 22652.0, 14285.7),
        # A file system of 2 GB/s is the limit: 1e12 / 2e9.
        (replace(HEADLINE, fs_bps=2e9), 500.0, 22652.0, 14285.7),
        # A link slower than the disk: 0.75 x 100 / 10 and 100 / 50.
        (
            Job(nbytes=100, ranks=4, mtbf_s=HOUR, link_bps=10, rank_bps=50),
            0.5,
            9.5,
            7.5,
        ),
        # One rank: nothing to gather.
        (Job(nbytes=100, ranks=1, mtbf_s=HOUR, rank_bps=50), 2.0, 2.0, 2.0),
        # A file system slower than one rank: all ways write at its speed.
        (
            Job(nbytes=90, ranks=9, mtbf_s=HOUR, link_bps=90, rank_bps=50, fs_bps=10),
            9.0,
            9.889,
            9.0,
        ),
    ],
)
def test_time_to_save(job, shards_s, in_turn_s, overlapped_s):
    found = (
        shards_seconds(job),
        gather_seconds(job, overlapped=False),
        gather_seconds(job, overlapped=True),
    )

    assert found == pytest.approx((shards_s, in_turn_s, overlapped_s), rel=1e-3)


def test_headline_is_four_hours_against_four_minutes():
    cost = cost_of(HEADLINE)

    assert cost.gather.save_s / HOUR == pytest.approx(4, rel=0.02)
    assert cost.shards.save_s / 60 == pytest.approx(4, rel=0.1)
    assert cost.ratio == pytest.approx(64)


def test_link_of_the_headline_is_what_gigabit_ethernet_carries():
    assert pytest.approx(117.7e6, rel=1e-3) == GIGABIT_LINK_BPS


def test_interval_is_daly_and_loss_is_half_of_it_and_a_load():
    way = cost_of(HEADLINE).shards

    x = math.sqrt(way.save_s / (2 * 4 * HOUR))
    daly_s = math.sqrt(2 * way.save_s * 4 * HOUR) * (1 + x / 3 + x**2 / 9) - way.save_s
    assert way.interval_s == pytest.approx(daly_s)
    assert way.lost_s == pytest.approx((daly_s + way.save_s) / 2 + way.save_s)


def test_overhead_is_the_known_first_order_where_saves_are_cheap():
    # C / τ + (τ + C) / 2 M + R / M, Young 1974.
    interval_s = math.sqrt(2 * 1.0 * 1e6)

    found = overhead_of(
        interval_s=interval_s, blocking_s=1.0, restart_s=10.0, mtbf_s=1e6
    )

    first_order = 1 / interval_s + interval_s / 2e6 + 10 / 1e6
    assert found == pytest.approx(first_order, rel=0.01)


def test_no_interval_beats_the_one_that_is_advised():
    way = cost_of(replace(HEADLINE, mtbf_s=40 * HOUR)).shards

    def overhead(interval_s):
        return overhead_of(
            interval_s=interval_s,
            blocking_s=way.blocking_s,
            restart_s=way.load_s,
            mtbf_s=40 * HOUR,
        )

    others = [overhead(way.interval_s * factor) for factor in (0.7, 0.9, 1.1, 1.4)]
    assert way.overhead == pytest.approx(overhead(way.interval_s))
    assert min(others) > way.overhead


def test_asynchronous_save_waits_for_the_copy_and_never_overtakes_itself():
    slow = replace(HEADLINE, fs_bps=2e8)

    way = cost_of(slow).shards_async

    assert way.blocking_s == pytest.approx(TB / 64 / slow.memory_bps)
    assert way.interval_s == pytest.approx(way.save_s - way.blocking_s)


def test_a_save_longer_than_the_time_between_failures_ends_in_no_progress():
    way = cost_of(replace(HEADLINE, mtbf_s=60.0)).gather

    assert way.interval_s == 60.0
    assert way.overhead == pytest.approx(1.0)


def test_space_counts_the_one_in_flight():
    assert cost_of(replace(HEADLINE, keep=5)).space_nbytes == 6 * TB


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (HEADLINE, "128 ranks would save in 112 s"),
        (replace(HEADLINE, fs_bps=7e8), "10 ranks already write as fast"),
        (HEADLINE, "save asynchronously"),
        (HEADLINE, "less than half of the time for progress"),
    ],
)
def test_advice(job, said):
    assert any(said in line for line in advice(job, cost_of(job)))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.25, "250 ms"),
        (90, "90 s"),
        (223, "3.72 min"),
        (14286, "3.97 h"),
        (4e5, "4.63 d"),
    ],
)
def test_times_are_said_as_people_say_them(seconds, text):
    assert seconds_said(seconds) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (980e9, "980 GB"), (999.6e9, "1 TB"), (1e18, "1000 PB")],
)
def test_sizes_are_said_in_decimal_units(nbytes, text):
    assert nbytes_said(nbytes) == text

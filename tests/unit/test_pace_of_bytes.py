"""The limit of bandwidth, by a clock of the test's own."""

import threading

import pytest

from mpickpt.planning.pace_of_bytes import ByteMeter, BytePace


class Clock:
    """Time that passes when somebody waits."""

    def __init__(self, oversleep_s=0.0):
        self.now_s = 100.0
        self.oversleep_s = oversleep_s
        self.waits = []

    def __call__(self):
        return self.now_s

    def wait(self, seconds, cancelled):
        self.waits.append(seconds)
        self.now_s += seconds + self.oversleep_s


def pace_of(rate, clock):
    return BytePace(rate, clock=clock, wait=clock.wait)


@pytest.mark.parametrize(
    ("rate", "piece", "count", "oversleep_s"),
    [
        (100e6, 512 << 10, 1000, 0.0),
        (100e6, 512 << 10, 1000, 0.002),
        (1e9, 512 << 10, 5000, 0.001),
        (1e6, 4 << 20, 10, 0.05),
        (3.0, 1, 50, 0.0),
    ],
)
def test_speed_is_the_limit_within_15_percent(rate, piece, count, oversleep_s):
    clock = Clock(oversleep_s)
    pace = pace_of(rate, clock)
    begin_s = clock()

    for _ in range(count):
        pace.take(piece)
    pace.take(0)

    speed = piece * count / (clock() - begin_s)
    assert 0.85 * rate < speed < 1.15 * rate


def test_time_that_was_not_used_is_not_saved_up():
    clock = Clock()
    pace = pace_of(1000.0, clock)
    pace.take(1000)
    clock.now_s += 3600.0
    begin_s = clock()

    for _ in range(10):
        pace.take(1000)
    pace.take(0)

    assert clock() - begin_s > 9.5


def test_none_is_no_limit():
    clock = Clock()
    pace = pace_of(None, clock)

    for _ in range(100):
        pace.take(1 << 40)

    assert clock.waits == []
    assert pace.nbytes == 100 << 40
    assert pace.seconds_for(1 << 40) == 0.0


@pytest.mark.parametrize("rate", [0, -1.0, float("nan")])
def test_a_limit_that_is_none_is_refused(rate):
    with pytest.raises(ValueError, match="more than 0"):
        BytePace(rate)


def test_threads_share_the_limit():
    clock = Clock()
    lock = threading.Lock()
    pace = BytePace(1000.0, clock=clock, wait=lambda s, _: waits.append(s))
    waits = []

    def take():
        for _ in range(50):
            with lock:
                pace.take(10)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    # Time stands still: the last of 200 pieces has to wait for all before it.
    assert max(waits) == pytest.approx(199 * 10 / 1000.0 - 0.1, abs=0.11)


def test_an_event_ends_the_waiting():
    pace = BytePace(1.0)
    cancelled = threading.Event()
    pace.take(3600)
    threading.Timer(0.05, cancelled.set).start()

    pace.take(1, cancelled)

    assert cancelled.is_set()


def test_meter_tells_the_speed_of_the_last_runs_and_of_this_one():
    clock = Clock()
    pace = pace_of(None, clock)
    meter = ByteMeter(clock=clock)
    before = meter.bytes_per_s()

    with meter.running(pace):
        pace.take(1000)
        clock.now_s += 10.0
        during = meter.bytes_per_s()
    clock.now_s += 1000.0
    after = meter.bytes_per_s()

    assert before is None
    assert during == after == pytest.approx(100.0)

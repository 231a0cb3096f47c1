"""Creates and opens of a large world are spread over time."""

from types import SimpleNamespace

import pytest

from mpickpt.parallel.turns import turn_to_create_s, turn_to_open_s
from mpickpt.planning.file_systems import FileSystem
from mpickpt.planning.pace import AT_ONCE, LONGEST_S, delay_s

WORLDS = (AT_ONCE + 1, 999, 1000, 1001, 1500, 2000, 10_240)
PER_S = 5000.0


def delays(n_ranks, per_s=PER_S, **options):
    return [delay_s(rank, n_ranks, per_s, **options) for rank in range(n_ranks)]


def talk(rank, size, timeout_s=600.0):
    return SimpleNamespace(rank=rank, size=size, timeout_s=timeout_s)


@pytest.mark.parametrize("n_ranks", [1, 2, 64, AT_ONCE])
def test_small_world_does_not_wait(n_ranks):
    assert not any(delays(n_ranks, 1.0))


@pytest.mark.parametrize("n_ranks", WORLDS)
def test_world_does_not_wait_for_a_local_disk(n_ranks):
    assert not any(delays(n_ranks, None))


@pytest.mark.parametrize("n_ranks", WORLDS)
def test_ranks_come_one_by_one_at_the_rate(n_ranks):
    turns = sorted(delays(n_ranks))

    expected = [turn / PER_S for turn in range(n_ranks)]
    assert turns == pytest.approx(expected)


@pytest.mark.parametrize("n_ranks", WORLDS)
@pytest.mark.parametrize("most_s", [LONGEST_S, 0.05])
def test_nobody_waits_longer_than_the_most(n_ranks, most_s):
    turns = delays(n_ranks, 1.0, most_s=most_s)

    assert 0.9 * most_s < max(turns) < most_s
    assert len(set(turns)) == n_ranks


@pytest.mark.parametrize("n_ranks", WORLDS)
def test_ranks_of_a_directory_come_in_their_order(n_ranks):
    for start in range(0, n_ranks, 1000):
        turns = delays(n_ranks)[start : start + 1000]
        assert turns == sorted(turns)


def test_directories_go_side_by_side():
    turns = delays(3000)

    first = sorted(range(3000), key=turns.__getitem__)[:6]
    assert first == [0, 1000, 2000, 1, 1001, 2001]


def test_turn_is_short_against_the_deadline():
    turns = [turn_to_create_s(talk(rank, 1000, 2.0), 1.0) for rank in range(1000)]

    assert max(turns) < 0.5


@pytest.mark.parametrize(
    ("kind", "waits"), [("lustre", True), ("nfs", True), ("xfs", False), ("new", False)]
)
def test_turn_to_open_is_that_of_the_file_system(tmp_path, monkeypatch, kind, waits):
    found = FileSystem(
        kind=kind, type=kind, magic=0, point="/", source="", block_nbytes=4096
    )
    monkeypatch.setattr("mpickpt.parallel.turns.file_system_of", lambda path: found)

    assert (turn_to_open_s(talk(999, 1000), tmp_path) > 0) == waits


def test_small_world_does_not_ask_for_the_file_system(tmp_path, monkeypatch):
    monkeypatch.setattr("mpickpt.parallel.turns.file_system_of", None)

    assert turn_to_open_s(talk(1, 2), tmp_path) == 0.0

"""How late a change is seen: by itself, only when listed, or not at all."""

from dataclasses import replace

import pytest

from mpickpt.doctor import visibility
from mpickpt.doctor.asking import Asking
from mpickpt.doctor.visibility import CHANGES, Sight, Watch, measure_delays, sight_of
from mpickpt.doctor.visit import QUICK, Visit


class OneNode:
    """Ranks of which the other node's one does nothing but wait."""

    rank, size = 1, 2

    def barrier(self):
        pass

    def all_of(self, value):
        return [True, value]


@pytest.fixture(autouse=True)
def short_patience(monkeypatch):
    monkeypatch.setattr(visibility, "PATIENCE_S", 0.05)
    monkeypatch.setattr(visibility, "_LISTED_SLEEP_S", 0.01)


def change_seen(after):
    """Return a change that is seen at one of the looks that follow."""
    looks = iter(range(10**6))
    return replace(CHANGES[0], is_seen=lambda _: next(looks) >= after)


def test_what_is_there_at_the_first_look_has_no_delay(tmp_path):
    assert sight_of(change_seen(after=0), tmp_path / "x", 1.0) == Sight(0.0)


def test_what_comes_by_itself_has_a_delay(tmp_path):
    found = sight_of(change_seen(after=3), tmp_path / "x", 1.0)

    assert 0 < found.delay_s < 1
    assert (found.was_listed, found.is_missing) == (False, False)


def test_what_comes_by_listing_is_told(tmp_path, monkeypatch):
    listed = []
    monkeypatch.setattr(visibility, "list_afresh", listed.append)
    change = replace(CHANGES[0], is_seen=lambda _: len(listed) > 1)

    found = sight_of(change, tmp_path / "x", 0.02)

    assert (found.was_listed, found.is_missing) == (True, False)
    assert listed == [tmp_path, tmp_path]


def test_what_never_comes_is_told(tmp_path):
    found = sight_of(change_seen(after=10**6), tmp_path / "x", 0.02)

    assert (found.was_listed, found.is_missing) == (False, True)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.name)
def test_change_is_seen_by_who_makes_it(tmp_path, change):
    path = tmp_path / "x"
    change.prepare(path)
    change.look(path)
    assert not change.is_seen(path)

    change.make(path)

    assert change.is_seen(path)


def watch(tmp_path, leaders):
    visit = Visit(
        directory=tmp_path,
        work=tmp_path,
        asking=Asking(),
        effort=replace(QUICK, limit_s=0.01, rounds=5),
        checkpoint_nbytes=None,
        n_ranks=2,
    )
    return Watch(ranks=OneNode(), leaders=leaders, visit=visit)


def test_one_host_has_no_other_to_look(tmp_path):
    assert measure_delays(watch(tmp_path, (0,))) == ()


def test_what_is_late_is_not_waited_for_again(tmp_path, monkeypatch):
    monkeypatch.setattr(visibility, "_LONG_S", 0.005)
    monkeypatch.setattr(visibility, "CHANGES", (change_seen(after=10**6),))
    monkeypatch.setattr(OneNode, "all_of", lambda _, value: [value, value])

    (found,) = measure_delays(watch(tmp_path, (0, 1)))

    assert (found.n_missing, found.count) == (2, 2)

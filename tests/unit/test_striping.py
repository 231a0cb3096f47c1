"""Striping the directory of a save, before there are shards, and what is said of it."""

import logging
import os

import pytest

from mpickpt.planning.stripe_layout import StripeLayout, plain_layout
from mpickpt.planning.striping import PROGRESSIVE, Striping
from mpickpt.storage import lustre, site_command, striping
from mpickpt.storage.filesystem import file_system_of
from mpickpt.storage.striping import Striped, stripe
from tests.lustre_like.layout_bytes import Plain, pack_composite
from tests.lustre_like.standin import N_OSTS, lustre_like, why_not

MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture(scope="module")
def mounted(tmp_path_factory):
    if reason := why_not():
        pytest.skip(reason)
    with lustre_like(tmp_path_factory.mktemp("lustre") / "stand-in") as stand_in:
        yield stand_in


@pytest.fixture(autouse=True)
def forgetful(monkeypatch):
    monkeypatch.setattr(striping, "_told", set())
    monkeypatch.setattr(striping, "_n_osts", {})
    monkeypatch.setattr(lustre, "_composites", {})
    monkeypatch.setattr(site_command, "_hung", {})


@pytest.fixture
def stand_in(mounted, monkeypatch):
    mounted.settle()
    monkeypatch.setenv("PATH", f"{mounted.install_lfs('works')}:{os.environ['PATH']}")
    return mounted


@pytest.fixture
def run(stand_in, tmp_path):
    made = stand_in.point / tmp_path.name
    made.mkdir()
    return made


def step_of(run, step=1):
    directory = run / f"step-{step:010}"
    directory.mkdir()
    return directory


def striped(directory, wish, shard_nbytes=20 * GIB, n_ranks=2):
    file_system = file_system_of(directory)
    return stripe(
        directory, file_system, wish, shard_nbytes=shard_nbytes, n_ranks=n_ranks
    )


def warnings(caplog):
    return [r for r in caplog.records if r.levelno >= logging.WARNING]


def without_lfs(monkeypatch, stand_in):
    path = os.environ["PATH"].replace(f"{stand_in.folder / 'bin'}:", "")
    monkeypatch.setenv("PATH", path)


def test_the_stand_in_is_taken_for_lustre(stand_in):
    found = file_system_of(stand_in.point)

    assert (found.kind, found.type) == ("lustre", "fuse.lustre")
    assert found.block_nbytes == 4 * MIB


@pytest.mark.parametrize(
    ("wish", "layout"),
    [
        ("auto", plain_layout(N_OSTS // 2, 16 * MIB)),
        (Striping(3, MIB), plain_layout(3, MIB)),
        (Striping(3, MIB, "flash"), plain_layout(3, MIB, "flash")),
        (PROGRESSIVE, PROGRESSIVE.layout),
    ],
    ids=str,
)
def test_a_wish_is_set_on_the_directory_and_read_back(run, caplog, wish, layout):
    directory = step_of(run)

    found = striped(directory, wish)

    assert found == Striped(layout=layout)
    assert lustre.inherited_layout(directory) == layout
    assert not warnings(caplog)


def test_what_is_wanted_already_is_not_set_again(stand_in, run):
    directory = step_of(run)
    striped(directory, Striping(3))
    stand_in.forget_operations()

    striped(directory, Striping(3))

    assert stand_in.operations() == []
    assert stand_in.lfs_calls() == []


def test_auto_asks_for_the_targets_once(stand_in, run):
    for step in range(3):
        striped(step_of(run, step), "auto")

    commands = [call[0] for call in stand_in.lfs_calls()]
    assert commands.count("df") == 1
    assert commands.count("setstripe") == 3


def test_site_changes_nothing(stand_in, run, caplog):
    stand_in.set_layout(stand_in.point, Plain(count=2, size=MIB).pack())
    directory = step_of(run)
    stand_in.forget_operations()

    found = striped(directory, "site")

    assert found == Striped(layout=plain_layout(2, MIB))
    assert stand_in.operations() == [] and stand_in.lfs_calls() == []
    assert not caplog.records


@pytest.mark.parametrize("count", [-1, 72])
def test_site_warns_once_of_a_run_directory_that_is_striped_too_wide(
    stand_in, run, caplog, count
):
    stand_in.set_layout(run, Plain(count=count, size=MIB).pack())
    other = run / "other"
    other.mkdir()

    notes = [striped(step_of(run, step), "site").notes for step in range(3)]
    striped(step_of(other), "site")

    assert notes[0] and notes.count(notes[0]) == 3
    assert [record.args[0] for record in warnings(caplog)] == [run, other]
    text = caplog.text
    assert "all ranks meet" in text and f"lfs setstripe -c 1 -S 4M {run}" in text


def test_site_leaves_a_composite_layout_that_nobody_can_read(
    stand_in, run, caplog, monkeypatch
):
    value = pack_composite([Plain(count=-1, size=MIB)])
    stand_in.set_layout(run, value)
    without_lfs(monkeypatch, stand_in)
    directory = step_of(run)
    stand_in.forget_operations()

    found = striped(directory, "site")

    assert found == Striped(layout=StripeLayout(components=(), is_composite=True))
    assert stand_in.operations() == [] and not caplog.records


def test_site_reads_a_composite_layout_through_lfs(stand_in, run, caplog):
    parts = [
        Plain(count=1, size=4 * MIB, end=GIB),
        Plain(count=-1, size=16 * MIB, start=GIB),
    ]
    stand_in.set_layout(run, pack_composite(parts))

    short = striped(step_of(run, 1), "site", shard_nbytes=GIB)
    before = len(warnings(caplog))
    long = striped(step_of(run, 2), "site", shard_nbytes=2 * GIB)

    assert short.layout == long.layout and short.layout.size == 16 * MIB
    assert not short.notes and before == 0
    assert long.notes and len(warnings(caplog)) == 1


@pytest.mark.parametrize("error", ["EPERM", "EOPNOTSUPP"])
@pytest.mark.parametrize("has_lfs", [True, False])
@pytest.mark.parametrize("wish", ["auto", Striping(3), PROGRESSIVE], ids=str)
def test_a_refusal_is_warned_of_once_and_the_save_goes_on(
    stand_in, run, caplog, monkeypatch, error, has_lfs, wish
):
    stand_in.settle(refusal=error)
    if not has_lfs:
        without_lfs(monkeypatch, stand_in)

    found = [striped(step_of(run, step), wish) for step in range(3)]

    assert all(each.notes for each in found)
    (warning,) = warnings(caplog)
    assert warning.name == "mpickpt.storage.striping"
    assert "cannot be striped as wanted" in warning.getMessage()
    assert str(run) in warning.getMessage()


def test_a_count_that_was_clipped_is_warned_of_and_the_layout_is_the_real_one(
    stand_in, run, caplog
):
    stand_in.settle(most_count=2)

    found = [striped(step_of(run, step), Striping(4, MIB)) for step in range(3)]

    assert [each.layout for each in found] == 3 * [plain_layout(2, MIB)]
    (warning,) = warnings(caplog)
    assert "did not take" in warning.getMessage()
    assert "2 stripes of 1 MiB" in warning.getMessage()


@pytest.mark.parametrize("behaviour", ["fails", "hangs"])
def test_lfs_that_is_broken_does_not_stop_a_save(
    stand_in, run, caplog, monkeypatch, behaviour
):
    stand_in.install_lfs(behaviour)
    monkeypatch.setattr(lustre, "_TIMEOUT_S", 0.2)

    found = striped(step_of(run), PROGRESSIVE)

    assert found.layout is None and len(warnings(caplog)) == 1


def test_without_lfs_auto_takes_as_few_targets_as_can_be(stand_in, run, monkeypatch):
    without_lfs(monkeypatch, stand_in)

    found = striped(step_of(run), "auto")

    assert found == Striped(layout=plain_layout(1, 16 * MIB))


def test_elsewhere_an_explicit_striping_is_warned_of_once(tmp_path, caplog):
    directory = tmp_path / "run" / "step-0000000001"
    directory.mkdir(parents=True)

    silent = [striped(directory, wish) for wish in ("site", "auto")]
    explicit = [striped(directory, Striping(4)) for _ in range(2)]

    assert silent == 2 * [Striped()]
    assert all(each.notes and each.layout is None for each in explicit)
    (warning,) = warnings(caplog)
    assert "is for Lustre" in warning.getMessage()

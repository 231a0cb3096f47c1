"""Saves to what stands for Lustre: when the directory is striped, and what is said."""

import contextlib
import logging
import os

import numpy as np
import pytest

from mpickpt import Sharded, load_sharded, save_sharded
from mpickpt.format import naming
from mpickpt.parallel.options import SaveOptions
from mpickpt.planning.striping import PROGRESSIVE, Striping
from mpickpt.storage import lustre, striping
from tests.lustre_like.layout_bytes import Plain
from tests.lustre_like.standin import N_OSTS, LustreLike, lustre_like, why_not

MIB = 1 << 20
WIDE = Plain(count=-1, size=MIB)


@pytest.fixture
def stand_in(comm, shared_tmp_path, monkeypatch):
    """Rank 0 mounts it, for all ranks."""
    if reason := comm.bcast(why_not()):
        pytest.skip(reason)
    monkeypatch.setattr(striping, "_told", set())
    monkeypatch.setattr(striping, "_n_osts", {})
    monkeypatch.setattr(lustre, "_composites", {})
    folder = shared_tmp_path / "stand-in"
    mounted = lustre_like(folder) if comm.rank == 0 else contextlib.nullcontext()
    with mounted:
        found = LustreLike(point=folder / "scratch", folder=folder)
        if comm.rank == 0:
            found.install_lfs("works")
            (found.point / "run").mkdir()
            found.set_layout(found.point, WIDE.pack())
        comm.Barrier()
        path = f"{folder / 'bin'}:{os.environ['PATH']}"
        monkeypatch.setenv("PATH", path)
        yield found
        comm.Barrier()


def settle(comm, stand_in, **settings):
    if comm.rank == 0:
        stand_in.settle(**settings)
    comm.Barrier()


def save(comm, stand_in, step=1, **options):
    """Save a few bytes and load them again; return the directory."""
    own = np.arange(1000, dtype=np.int32) + comm.rank
    directory = stand_in.point / "run" / f"step-{step:010}"
    state = {"x": Sharded.block(own)}
    save_sharded(state, directory, step=step, comm=comm, options=SaveOptions(**options))
    loaded = load_sharded(directory, comm=comm)
    assert np.array_equal(loaded["x"].data, own)
    return directory


def layouts_of_shards(stand_in, directory):
    found = [stand_in.layout_of(path) for path in directory.glob("rank*.h5")]
    return [[(part.count, part.size) for part in layout] for layout in found]


def warnings(caplog):
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and "striping" in record.name
    ]


@pytest.mark.parametrize(
    ("wish", "parts"),
    [
        ("auto", [(1, 4 * MIB)]),
        ("pfl", [(1, 4 * MIB), (4, 16 * MIB)]),
        ("count=2,size=1MiB,pool=flash", [(2, MIB)]),
        (Striping(3, 8 * MIB), [(3, 8 * MIB)]),
        (PROGRESSIVE, [(1, 4 * MIB), (4, 16 * MIB)]),
    ],
    ids=["auto", "pfl", "text", "plain", "progressive"],
)
def test_the_directory_is_striped_before_there_is_a_shard(
    comm, stand_in, caplog, wish, parts
):
    directory = save(comm, stand_in, striping=wish)

    operations = stand_in.operations()
    made = [n for n, (_, path) in enumerate(operations) if path.parent == directory]
    striped = [
        n for n, operation in enumerate(operations) if operation[0] == "setxattr"
    ]
    assert len(striped) == 1 and operations[striped[0]][1] == directory
    assert operations.index(("mkdir", directory)) < striped[0] < min(made)
    assert layouts_of_shards(stand_in, directory) == comm.size * [parts]
    assert warnings(caplog) == []


def test_the_directories_of_many_ranks_inherit_the_striping(
    comm, stand_in, monkeypatch
):
    monkeypatch.setattr(naming, "RANKS_PER_DIRECTORY", 1)

    directory = save(comm, stand_in, striping=Striping(3, 8 * MIB))

    folders = sorted(directory.glob("ranks*/"))
    assert len(folders) == (comm.size if comm.size > 1 else 0)
    assert [stand_in.layout_of(folder)[0].count for folder in folders] == [
        3 for _ in folders
    ]
    for folder in folders:
        assert layouts_of_shards(stand_in, folder) == [[(3, 8 * MIB)]]


def test_the_environment_says_how_to_stripe(comm, stand_in, monkeypatch):
    monkeypatch.setenv("MPICKPT_STRIPING", "count=2,size=1MiB")

    directory = save(comm, stand_in)

    assert layouts_of_shards(stand_in, directory) == comm.size * [[(2, MIB)]]


def test_a_site_layout_stays_and_is_warned_of_once_where_it_is_bad(
    comm, stand_in, caplog
):
    for step in range(3):
        directory = save(comm, stand_in, step)

    assert layouts_of_shards(stand_in, directory) == comm.size * [[(N_OSTS, MIB)]]
    assert not [path for name, path in stand_in.operations() if name == "setxattr"]
    texts = warnings(caplog)
    assert len(texts) == (1 if comm.rank == 0 and comm.size > 1 else 0)
    assert all("all ranks meet" in text for text in texts)


@pytest.mark.parametrize(
    ("error", "wish"), [("EPERM", "auto"), ("EOPNOTSUPP", Striping(4))]
)
def test_where_a_site_forbids_it_the_save_goes_on(comm, stand_in, caplog, error, wish):
    settle(comm, stand_in, refusal=error)

    for step in range(2):
        save(comm, stand_in, step, striping=wish)

    texts = warnings(caplog)
    assert len(texts) == (comm.rank == 0)
    assert all("cannot be striped as wanted" in text for text in texts)


def test_what_did_not_take_is_warned_of_once(comm, stand_in, caplog):
    settle(comm, stand_in, most_count=2)

    for step in range(2):
        directory = save(comm, stand_in, step, striping=Striping(4, MIB))

    assert layouts_of_shards(stand_in, directory) == comm.size * [[(2, MIB)]]
    texts = warnings(caplog)
    assert len(texts) == (comm.rank == 0)
    assert all("did not take" in text for text in texts)

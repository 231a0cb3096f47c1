"""Restores from the disks of nodes, where each shard lies on some of them only."""

import shutil

import numpy as np
import pytest

import mpickpt
from tests.local_tier import Disks, restore, saved
from tests.states import failure_on_ranks, on_ranks

SIZE = 4
STEP = 7
EACH = [0, 1, 2, 3]
NEXT = [1, 2, 3, 0]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run in one directory, with steps 5 and 7."""
    path = tmp_path_factory.mktemp("shared") / "run"
    for step in (5, STEP):
        saved(path, SIZE, step)
    return path


@pytest.fixture
def disks(tmp_path):
    return Disks(tmp_path, SIZE)


@pytest.fixture
def shared(run, tmp_path):
    """A further tier that holds the same checkpoints."""
    shutil.copytree(run, tmp_path / "shared")
    return tmp_path / "shared"


def spread(disks, run, *steps, **options):
    for step in steps or (STEP,):
        disks.spread(mpickpt.step_path(run, step), **{"homes": EACH, **options})


def restored(disks, places=EACH, size=SIZE, **options):
    found = on_ranks(size, lambda comm: restore(comm, disks, places, **options))
    assert len({(one.step, one.source) for one in found}) == 1
    return found[0]


def failure(disks, places=EACH, size=SIZE, **options):
    return failure_on_ranks(size, lambda comm: restore(comm, disks, places, **options))


def flip(path, offset=None):
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if offset is None else offset] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("tells_tier", [True, False])
def test_all_shards_are_read_where_they_are(disks, run, tells_tier):
    spread(disks, run, tells_tier=tells_tier)
    before = disks.files()

    found = restored(disks)

    assert (found.step, found.rejected) == (STEP, {})
    assert found.source == "4 shards from the nodes that read them"
    assert disks.files() == before


def test_ranks_placed_elsewhere_get_their_shards_from_other_nodes(disks, run):
    spread(disks, run)

    found = restored(disks, places=NEXT)

    assert "from the nodes that read them" not in found.source
    assert found.source.count(" from node ") == 4
    for rank in range(SIZE):
        assert disks.holders(STEP, rank) == sorted({rank, (rank + 1) % SIZE})


def test_shards_that_were_brought_are_read_at_home_the_next_time(disks, run):
    spread(disks, run)
    restored(disks, places=NEXT)

    again = restored(disks, places=NEXT)

    assert again.source == "4 shards from the nodes that read them"


def test_lost_node_is_made_up_for_by_partner_copies(disks, run):
    spread(disks, run, copies=NEXT)
    disks.wipe(2)

    found = restored(disks)

    assert found.step == STEP
    assert found.source.startswith(
        "3 shards from the nodes that read them, 1 from node"
    )
    assert disks.shard(2, STEP, 2).exists()
    assert mpickpt.latest(disks.run(2)) == disks.step(2, STEP)


def test_lost_node_without_copies_comes_from_the_next_tier(disks, run, shared):
    spread(disks, run)
    disks.wipe(2)

    found = restored(disks, others=[shared])

    tier = mpickpt.step_path(shared, STEP)
    assert found.source == f"3 shards from the nodes that read them, 1 from {tier}"
    assert disks.shard(2, STEP, 2).exists()


def test_lost_node_without_copies_or_tiers_costs_the_checkpoint(disks, run):
    spread(disks, run)
    disks.wipe(2)

    error = failure(disks)

    assert isinstance(error, mpickpt.IncompleteCheckpointError)
    assert "rank00002" in str(error)


def test_tier_with_a_newer_step_is_preferred(disks, run, shared):
    spread(disks, run, 5)

    found = restored(disks, others=[shared])

    assert found.step == STEP
    assert found.source == f"4 shards from {mpickpt.step_path(shared, STEP)}"
    assert disks.holders(STEP, 3) == [3]


def test_copy_that_was_not_finished_gives_what_it_has(disks, run, shared):
    spread(disks, run)
    disks.wipe(1)
    unfinished = mpickpt.step_path(shared, STEP)
    (unfinished / "manifest.json").unlink()
    next(unfinished.glob("rank00003-*")).unlink()

    found = restored(disks, others=[shared])

    assert (found.step, found.source.count(" 1 from ")) == (STEP, 1)


def test_several_tiers_are_asked_in_their_order(disks, run, shared, tmp_path):
    nearer = tmp_path / "nearer"
    shutil.copytree(run, nearer)
    flip(next(mpickpt.step_path(nearer, STEP).glob("rank00001-*")))

    found = restored(disks, others=[nearer, shared])

    near, far = (mpickpt.step_path(one, STEP) for one in (nearer, shared))
    assert found.source == f"3 shards from {near}, 1 from {far}"


@pytest.mark.parametrize("verify", ["sha256", "crc32"])
def test_damaged_shard_comes_from_its_copy_and_is_repaired(disks, run, verify):
    spread(disks, run, copies=NEXT)
    good = disks.shard(1, STEP, 1).read_bytes()
    flip(disks.shard(1, STEP, 1))

    found = restored(disks, verify=verify)

    assert found.source.startswith(
        "3 shards from the nodes that read them, 1 from node"
    )
    assert disks.shard(1, STEP, 1).read_bytes() == good


def test_damaged_shard_comes_from_the_next_tier_alone(disks, run, shared):
    spread(disks, run)
    flip(disks.shard(1, STEP, 1))

    found = restored(disks, others=[shared])

    assert found.source.startswith("3 shards from the nodes that read them, 1 from /")
    assert restored(disks).source == "4 shards from the nodes that read them"


def test_damaged_index_is_repaired_too(disks, run, shared):
    spread(disks, run)
    offset, _, _ = mpickpt.read_manifest(disks.step(1, STEP)).shards[1].index
    flip(disks.shard(1, STEP, 1), offset)

    assert restored(disks, others=[shared]).step == STEP


@pytest.mark.parametrize("how", ["short", "missing"])
def test_shard_without_its_size_counts_as_none(disks, run, how):
    spread(disks, run, copies=NEXT)
    path = disks.shard(1, STEP, 1)
    path.write_bytes(b"short") if how == "short" else path.unlink()

    found = restored(disks)

    assert found.source.startswith(
        "3 shards from the nodes that read them, 1 from node"
    )


def test_damaged_source_is_struck_out_for_the_next_one(disks, run, shared):
    spread(disks, run, copies=NEXT)
    disks.wipe(1)
    flip(disks.shard(2, STEP, 1))  # the copy of the shard that is lost

    found = restored(disks, others=[shared])

    tier = mpickpt.step_path(shared, STEP)
    assert found.source == (f"3 shards from the nodes that read them, 1 from {tier}")


def test_shard_that_is_damaged_everywhere_gives_an_older_checkpoint(disks, run, shared):
    spread(disks, run, 5, STEP, copies=NEXT)
    flip(disks.shard(1, STEP, 1))
    flip(disks.shard(2, STEP, 1))
    flip(next(mpickpt.step_path(shared, STEP).glob("rank00001-*")))

    found = restored(disks, others=[shared])

    assert (found.step, list(found.rejected)) == (5, [STEP])


def test_error_names_every_place_that_was_asked(disks, run, shared):
    spread(disks, run, copies=NEXT)
    flip(disks.shard(1, STEP, 1))
    flip(disks.shard(2, STEP, 1))
    shutil.rmtree(mpickpt.step_path(shared, 5))
    flip(next(mpickpt.step_path(shared, STEP).glob("rank00001-*")))

    error = failure(disks, others=[shared])

    text = str(error)
    assert isinstance(error, mpickpt.IncompleteCheckpointError)
    assert "rank00001" in text
    assert text.count("is damaged") >= 3
    assert str(mpickpt.step_path(shared, STEP)) in text


def test_manifest_on_one_node_is_enough_and_goes_to_all(disks, run):
    spread(disks, run, manifests=[2])

    found = restored(disks)

    assert found.source == "4 shards from the nodes that read them"
    for node in range(SIZE):
        assert mpickpt.latest(disks.run(node)) == disks.step(node, STEP)


def test_damaged_manifest_is_replaced(disks, run):
    spread(disks, run)
    flip(disks.step(0, STEP) / "manifest.json")

    assert restored(disks).step == STEP
    assert mpickpt.read_manifest(disks.step(0, STEP)).step == STEP


def test_damaged_manifests_everywhere_give_an_older_checkpoint(disks, run):
    spread(disks, run, 5, STEP)
    for node in range(SIZE):
        flip(disks.step(node, STEP) / "manifest.json")

    assert restored(disks).step == 5


def test_manifests_of_older_checkpoints_are_put_back_too(disks, run):
    spread(disks, run, 5, manifests=[1])
    spread(disks, run, STEP)

    restored(disks)

    assert [e.step for e in mpickpt.checkpoints(disks.run(3))] == [5, STEP]


@pytest.mark.parametrize(
    ("size", "places", "homes", "n_home"),
    [
        (2, [0, 1], [0, 0, 1, 1], 4),
        (2, [3, 2], [3, 2, 2, 2], 4),
        (8, EACH * 2, EACH, 4),
        (3, [2, 1, 0], [0, 0, 0, 0], 4),
    ],
)
def test_another_number_of_ranks_reads_at_home_what_it_can(
    disks, run, size, places, homes, n_home
):
    spread(disks, run, homes=homes)

    rows = 12 * SIZE // size
    found = restored(disks, places, size, rows=rows, reshard=True, check=False)

    assert found.source.startswith(f"{n_home} shards from the nodes that read them")


def test_state_is_right_after_resharding(disks, run):
    spread(disks, run, homes=[3, 3, 1, 1])

    def load(comm):
        found = restore(comm, disks, [3, 1], rows=24, reshard=True, check=False)
        return found.state["model"]["w"].data, found.state["own"].data

    halves = on_ranks(2, load)

    expected = np.repeat(STEP + np.arange(SIZE) / 10, 24).reshape(-1, 2)
    assert np.array_equal(np.concatenate([w for w, _ in halves]), expected)
    # The values of saved rank 0 are wanted on a node that has not its shard.
    assert [own.tolist() for _, own in halves] == [[700, 700]] * 2


def test_full_disk_has_the_next_tier_read_straight(disks, run, shared, monkeypatch):
    spread(disks, run)
    disks.wipe(2)
    refuse_room(monkeypatch, disks.run(2))

    found = restored(disks, others=[shared])

    assert (
        found.source == f"all 4 shards straight from {mpickpt.step_path(shared, STEP)}"
    )


def test_full_disk_without_other_tiers_is_an_error_and_loses_nothing(
    disks, run, monkeypatch
):
    spread(disks, run, copies=NEXT)
    disks.wipe(2)
    before = disks.files()
    refuse_room(monkeypatch, disks.run(2))

    error = failure(disks)

    assert isinstance(error, mpickpt.StorageError)
    assert error.path == str(disks.step(2, STEP))
    assert {name: disks.files().get(name) for name in before} == before


def refuse_room(monkeypatch, run):
    from mpickpt.parallel import bringing

    def refuse(directory, *_arguments, **_options):
        if directory.is_relative_to(run):
            raise mpickpt.StorageError("full", errno=28, path=str(directory))

    monkeypatch.setattr(bringing, "require_space", refuse)


def test_disk_that_fills_while_a_shard_arrives_is_an_error_on_all(
    disks, run, monkeypatch
):
    from mpickpt.storage.shard_file import ShardFile

    spread(disks, run, copies=NEXT)
    disks.wipe(2)
    write_at = ShardFile.write_at

    def refuse(self, view, offset):
        if self.path.is_relative_to(disks.run(2)):
            raise mpickpt.StorageError("full", errno=28, path=str(self.path))
        write_at(self, view, offset)

    monkeypatch.setattr(ShardFile, "write_at", refuse)

    error = failure(disks)

    assert isinstance(error, mpickpt.StorageError)
    assert not list(disks.run(2).rglob("*.tmp"))
    monkeypatch.undo()
    assert restored(disks).step == STEP


def test_checkpoint_of_the_same_step_that_was_left_behind_is_set_aside(
    disks, run, tmp_path
):
    older = saved(tmp_path / "older", SIZE, STEP)
    newer = saved(tmp_path / "newer", SIZE, STEP)
    disks.spread(older, homes=EACH, manifests=[3])
    for node in range(3):
        disks.wipe(node)
    shutil.rmtree(disks.run(3) / ".mpickpt", ignore_errors=True)
    disks.spread(newer, homes=[0, 1, 2, 0], manifests=[0, 1, 2])
    rename_later(disks, newer)

    found = restored(disks)

    assert found.manifest.checkpoint_id == mpickpt.read_manifest(newer).checkpoint_id
    (aside,) = disks.run(3).glob("step-*.rejected-*")
    assert mpickpt.read_manifest(aside).checkpoint_id == (
        mpickpt.read_manifest(older).checkpoint_id
    )


def rename_later(disks, newer):
    from tests.local_tier import rename_checkpoint

    for node in range(3):
        rename_checkpoint(disks.step(node, STEP), created_at="2999-01-01T00:00:00Z")


def test_nothing_at_all_is_none(disks):
    assert on_ranks(SIZE, lambda c: restore(c, disks, EACH)) == [None] * SIZE


def test_one_step_is_restored_though_newer_ones_are_there(disks, run):
    spread(disks, run, 5, STEP)

    assert restored(disks, step=5).step == 5
    assert isinstance(failure(disks, step=6), mpickpt.CheckpointNotFoundError)


def test_attempts_are_counted_on_every_node(disks, run):
    spread(disks, run, 5, STEP, copies=NEXT)
    for _ in range(2):
        restored(disks, max_attempts=2)
    disks.wipe(0)

    found = restored(disks, max_attempts=2)

    assert found.rejected == {STEP: "restored 2 times without progress since"}
    assert found.step == 5


def test_world_of_another_size_is_refused_before_anything_moves(disks, run):
    spread(disks, run)
    before = disks.files()

    error = failure(disks, [3, 2], 2)

    assert isinstance(error, mpickpt.WorldSizeMismatchError)
    assert disks.files() == before


def test_tier_that_cannot_be_asked_stops_the_way_back(disks, run, shared, monkeypatch):
    from mpickpt.storage import further_tiers

    def refuse(place):
        raise mpickpt.StorageError("no answer", errno=110)

    spread(disks, run, 5, STEP)
    monkeypatch.setattr(further_tiers, "checkpoints", refuse)
    assert restored(disks, others=[shared]).step == STEP
    disks.wipe(1)
    shutil.rmtree(mpickpt.step_path(shared, STEP))

    error = failure(disks, others=[shared])

    assert isinstance(error, mpickpt.StorageError)
    assert "no answer" in str(error)

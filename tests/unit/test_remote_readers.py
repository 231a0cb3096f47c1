"""Every reader takes a URL where it takes a path; against a store in memory."""

import errno
import json
import threading
import time

import msgspec
import numpy as np
import pytest

import mpickpt
from mpickpt import (
    CheckpointNotFoundError,
    CorruptShardError,
    IncompleteCheckpointError,
    ManifestError,
    Sharded,
    StorageError,
)
from mpickpt.format.digest import BLOCK_NBYTES
from mpickpt.format.manifest import dump_manifest
from mpickpt.format.naming import MANIFEST_NAME
from mpickpt.storage.verification import verify_checkpoint
from tests.ranks_as_threads import run_ranks
from tests.stores_double import URL, memory_store
from tests.unit.cli_runs import MATRIX, run, save, state_of

RUN = f"{URL}/run"
STEP = f"{RUN}/step-0000000012"


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("saved")
    for step in (7, 12):
        save(
            mpickpt.step_path(run_dir, step),
            step=step,
            metadata={"seed": 1},
            metrics={"loss": 1 / step},
        )
    return run_dir


@pytest.fixture
def store(saved_run, monkeypatch):
    store = memory_store(monkeypatch)
    store.copy_in(saved_run, "run")
    return store


def shard_name(store, rank, step=12):
    manifest = mpickpt.read_manifest(mpickpt.step_path(RUN, step))
    return f"run/step-{step:010}/{manifest.shards[rank].path}"


def place_of_matrix(store, name):
    return store.files[name].find(MATRIX[:4].tobytes()[:8])


def test_run_is_listed_in_order_of_step(store):
    store.files["run/step-0000000099/rank00000-0123abcd.h5"] = b"copied just now"
    store.files["run/notes.txt"] = b"mine"

    assert [entry.step for entry in mpickpt.checkpoints(RUN)] == [7, 12]
    assert str(mpickpt.latest(RUN)) == STEP
    assert str(mpickpt.step_path(RUN, 12)) == STEP
    assert mpickpt.checkpoints(f"{URL}/other") == ()
    assert mpickpt.latest(f"{URL}/other") is None


def test_places_of_a_store_are_readers_of_it_again(store):
    for place in (STEP, mpickpt.latest(RUN), mpickpt.checkpoints(RUN)[-1].path):
        assert mpickpt.read_manifest(place).step == 12


def test_manifest_is_read_by_one_request(store):
    manifest = mpickpt.read_manifest(STEP)

    assert (manifest.step, manifest.world_size) == (12, 2)
    assert store.asked.total() == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run/step-0000000001", "nothing is stored there; .*/run .* latest is .*0012$"),
        ("absent", "nothing is stored there"),
        ("run", "run directory that holds 2; the latest is .*step-0000000012"),
        ("run/step-0000000099", "1 shards but no manifest.json: a copy"),
        ("other", "holds a.txt, b.txt"),
    ],
)
def test_not_found_names_the_url_and_tells_what_is_there(store, name, text):
    store.files["run/step-0000000099/rank00000-0123abcd.h5"] = b"copied just now"
    store.files |= {"other/a.txt": b"", "other/b.txt": b""}

    with pytest.raises(CheckpointNotFoundError, match=text) as caught:
        mpickpt.read_manifest(f"{URL}/{name}")

    assert f"no checkpoint at {URL}/{name}: " in str(caught.value)


def test_store_that_refuses_is_no_missing_checkpoint(store):
    store.refuse = errno.EACCES

    with pytest.raises(StorageError) as caught:
        mpickpt.read_manifest(STEP)

    assert caught.value.errno == errno.EACCES


def test_damaged_manifest_names_its_url(store):
    store.files["run/step-0000000012/manifest.json"] = b"{}"

    with pytest.raises(ManifestError, match=f"{STEP}/manifest.json"):
        mpickpt.read_manifest(STEP)


def test_checkpoint_is_opened(store):
    with mpickpt.open_checkpoint(STEP) as ckpt:
        assert np.array_equal(ckpt["model", "w"][...], MATRIX)
        assert np.array_equal(ckpt["model/w"][2:6, 1], MATRIX[2:6, 1])
        assert ckpt.per_rank("chain")[1].tolist() == [0, 1]
        assert ckpt["lr"] == 0.5
        assert "model/w" in ckpt
        assert ckpt.load()["names"] == ["a"]


def test_size_of_a_shard_is_asked_for_once(store):
    with mpickpt.open_checkpoint(STEP) as ckpt:
        ckpt.load()

    assert store.asked["stat"] == 2


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("verify", ["sha256", "crc32", "none"])
def test_load_reads_a_store_on_any_number_of_ranks(store, size, verify):
    def load(comm):
        return mpickpt.load_sharded(STEP, comm=comm, reshard=True, verify=verify)

    if size == 2:
        trees = run_ranks(size, lambda c: mpickpt.load_sharded(STEP, comm=c))
    else:
        wishes = [_wish(rank, size) for rank in range(size)]
        trees = run_ranks(
            size,
            lambda c: mpickpt.load_sharded(
                STEP,
                comm=c,
                like=wishes[c.rank],
                reshard=True,
                verify=verify,
                unexpected="ignore",
            ),
        )
    assert not [tree for tree in trees if isinstance(tree, BaseException)]
    rows = [tree["model"]["w"].data for tree in trees]
    assert np.array_equal(np.concatenate(rows), MATRIX)


def _wish(rank, size):
    bounds = [len(MATRIX) * r // size for r in range(size + 1)]
    own = np.zeros_like(MATRIX[bounds[rank] : bounds[rank + 1]])
    return {
        "model": {
            "w": Sharded(own, global_shape=MATRIX.shape, offset=(bounds[rank], 0))
        }
    }


def test_load_on_one_process_needs_no_comm(store):
    tree = mpickpt.load_sharded(
        STEP, like=_wish(0, 1), reshard=True, unexpected="ignore"
    )

    assert np.array_equal(tree["model"]["w"].data, MATRIX)


def test_load_of_an_absent_checkpoint_is_the_same_error_everywhere(store):
    url = f"{RUN}/step-0000000001"

    errors = run_ranks(2, lambda comm: mpickpt.load_sharded(url, comm=comm))

    assert {type(error) for error in errors} == {CheckpointNotFoundError}
    assert all(url in str(error) for error in errors)


def test_url_of_an_unknown_kind_is_the_same_error_everywhere(store):
    errors = run_ranks(2, lambda comm: mpickpt.load_sharded("x:y://z", comm=comm))

    assert len({type(error) for error in errors}) == 1
    assert all(isinstance(error, Exception) for error in errors)


def damage_flipped(store, name):
    store.flip(name, place_of_matrix(store, name) + 4)


def damage_truncated(store, name):
    store.files[name] = store.files[name][:-1]


def damage_grown(store, name):
    store.files[name] += b"\0"


def damage_missing(store, name):
    del store.files[name]


DAMAGE = {
    "flipped": (damage_flipped, CorruptShardError, "should have"),
    "truncated": (damage_truncated, IncompleteCheckpointError, "bytes; expected are"),
    "grown": (damage_grown, IncompleteCheckpointError, "bytes; expected are"),
    "missing": (damage_missing, IncompleteCheckpointError, "is missing"),
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("verify", ["sha256", "crc32"])
def test_damage_is_told_by_load(store, kind, verify):
    damage, cls, text = DAMAGE[kind]
    name = shard_name(store, 1)
    damage(store, name)

    errors = run_ranks(
        2, lambda comm: mpickpt.load_sharded(STEP, comm=comm, verify=verify)
    )

    assert {type(error) for error in errors} == {cls}
    assert all(f"{URL}/{name}" in str(error) for error in errors)
    assert all(text in str(error) for error in errors)


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("fast", [False, True])
def test_damage_is_told_by_verify(store, kind, fast):
    damage, cls, text = DAMAGE[kind]
    name = shard_name(store, 1)
    damage(store, name)

    report = verify_checkpoint(STEP, fast=fast)

    (failure,) = report.failures
    assert type(failure.error) is cls
    assert f"{URL}/{name}" in str(failure.error)
    assert text in str(failure.error)
    if kind == "flipped":
        assert [block.keys for block in failure.blocks] == [("chain", "model/w")]


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_told_by_open_checkpoint(store, kind):
    damage, cls, text = DAMAGE[kind]
    name = shard_name(store, 1)
    damage(store, name)

    with (
        pytest.raises(cls, match=text),
        mpickpt.open_checkpoint(STEP) as ckpt,
    ):
        ckpt["model/w"][...]


def test_object_that_is_cut_while_it_is_read_is_incomplete(store):
    name = shard_name(store, 0)
    with mpickpt.open_checkpoint(STEP) as ckpt:
        ckpt.keys()
        store.files[name] = store.files[name][:100]

        with pytest.raises(IncompleteCheckpointError, match=f"{name} has 100 bytes"):
            ckpt["model/w"][...]


def test_layout_file_that_is_missing_makes_a_load_fail(store):
    layout = mpickpt.read_manifest(STEP).layout.path
    del store.files[f"run/step-0000000012/{layout}"]

    errors = run_ranks(2, lambda comm: mpickpt.load_sharded(STEP, comm=comm))

    assert {type(error) for error in errors} == {IncompleteCheckpointError}


def test_checkpoint_that_was_replaced_meanwhile_is_read_anew(store, saved_run, capsys):
    with mpickpt.open_checkpoint(STEP) as ckpt:
        before = ckpt.manifest.checkpoint_id
        for name in [n for n in store.files if n.startswith("run/step-0000000012/")]:
            del store.files[name]
        again = saved_run.parent / f"again-{before[:4]}" / "step-0000000012"
        save(again, step=12)
        store.copy_in(again, "run/step-0000000012")

        assert np.array_equal(ckpt["model/w"][...], MATRIX)
        assert ckpt.manifest.checkpoint_id != before


@pytest.fixture
def large(tmp_path, monkeypatch):
    """A checkpoint of one shard of 40 MiB."""
    path = tmp_path / "step-0000000003"
    rows = np.random.default_rng(3).integers(0, 255, (40, 1 << 20), "u1")
    mpickpt.save_sharded({"x": Sharded.block(rows)}, path, step=3)
    store = memory_store(monkeypatch)
    store.copy_in(path, "run/step-0000000003")
    return store, rows


def test_no_reader_asks_for_more_than_a_block_at_once(large, capsys, tmp_path):
    store, rows = large
    url = f"{RUN}/step-0000000003"

    tree = mpickpt.load_sharded(url)
    assert np.array_equal(tree["x"].data, rows)
    assert verify_checkpoint(url).is_whole
    with mpickpt.open_checkpoint(url) as ckpt:
        assert np.array_equal(ckpt["x"][3:5], rows[3:5])
    status, _, _ = run(capsys, "export", url, "x", "-o", tmp_path / "x.npy")

    assert status == 0
    assert store.largest_read == BLOCK_NBYTES


def test_load_keeps_some_requests_under_way(large):
    store, _ = large
    store.latency_s = 0.1

    mpickpt.load_sharded(f"{RUN}/step-0000000003", verify="crc32")

    assert store.most_at_once in (2, 3)


def test_slice_reads_the_blocks_that_hold_it(large):
    store, rows = large
    with mpickpt.open_checkpoint(f"{RUN}/step-0000000003") as ckpt:
        assert np.array_equal(ckpt["x"][0:2], rows[0:2])
        store.asked.clear()

        assert np.array_equal(ckpt["x"][35], rows[35])

    assert store.asked == {"read_into": 1}


def test_indexes_of_many_shards_are_read_together(tmp_path, monkeypatch):
    path = tmp_path / "step-0000000001"
    save(path, size=8, step=1)
    store = memory_store(monkeypatch)
    store.copy_in(path, "run/step-0000000001")
    store.latency_s = 0.1

    with mpickpt.open_checkpoint(f"{RUN}/step-0000000001") as ckpt:
        keys = ckpt.keys()

    assert "model/w" in keys
    assert store.most_at_once >= 4


def test_ls_of_many_checkpoints_does_not_wait_for_each(store, capsys):
    manifest = mpickpt.read_manifest(STEP)
    for step in range(100, 200):
        for name in [n for n in store.files if n.startswith("run/step-0000000012/")]:
            other = name.replace("0000000012", f"{step:010}")
            store.files[other] = store.files[name]
        text = dump_manifest(msgspec.structs.replace(manifest, step=step))
        store.files[f"run/step-{step:010}/{MANIFEST_NAME}"] = text
    store.asked.clear()
    store.latency_s = 0.05
    begin = time.monotonic()

    _, out, _ = run(capsys, "ls", RUN)

    waited_s = time.monotonic() - begin
    assert out.count("whole") == 102
    assert store.asked.total() < 2 * 102 + 10
    assert waited_s < store.asked.total() * store.latency_s / 3
    assert 8 <= store.most_at_once <= 16


def test_commands_take_a_url(store, capsys, tmp_path):
    status, out, _ = run(capsys, "latest", RUN)
    assert (status, out) == (0, f"{STEP}\n")
    status, out, _ = run(capsys, "show", STEP)
    assert status == 0
    assert out.startswith(f"{STEP}\n")
    status, out, _ = run(capsys, "verify", RUN)
    assert status == 0
    assert out.count(": whole (3 files, ") == 2
    status, out, _ = run(capsys, "verify", "--fast", STEP)
    assert (status, out.count("whole")) == (0, 1)
    status, out, _ = run(capsys, "diff", STEP, f"{RUN}/step-0000000007")
    assert (status, out) == (0, "")
    status, _, _ = run(capsys, "export", STEP, "model/w", "-o", tmp_path / "w.npy")
    assert status == 0
    assert np.array_equal(np.load(tmp_path / "w.npy"), MATRIX)


def test_diff_compares_a_store_with_a_directory(store, saved_run, tmp_path, capsys):
    other = tmp_path / "other"

    def change(state, rank):
        state["lr"] = 0.25

    save(other, step=12, change=change)

    same = run(capsys, "diff", STEP, saved_run / "step-0000000012")
    status, out, _ = run(capsys, "diff", STEP, other)

    assert same[:2] == (0, "")
    assert (status, out) == (3, "lr: value: 0.5 | 0.25\n")


def test_ls_tells_the_state_of_each(store, capsys):
    store.files["run/step-0000000020/rank00000-0123abcd.h5"] = b"1"
    store.modified_s["run/step-0000000020/rank00000-0123abcd.h5"] = time.time()
    store.files["run/step-0000000021/rank00000-0123abcd.h5"] = b"1"
    store.files["run/step-0000000030/manifest.json"] = b"{}"
    store.files["run/step-0000000031.rejected-0123abcd/manifest.json"] = b"{}"
    damage_missing(store, shard_name(store, 0, step=7))

    status, out, _ = run(capsys, "ls", RUN)

    rows = [line.split() for line in out.splitlines()][1:]
    assert [(row[0], row[-5]) for row in rows] == [
        ("7", "damaged"),
        ("12", "whole"),
        ("20", "saving"),
        ("21", "unfinished"),
        ("30", "damaged"),
        ("31", "rejected"),
    ]
    assert rows[1][-3:] == ["loss=0.0833333", "run", "step-0000000012"]
    assert status == 0


def test_ls_names_the_kind_of_tier(store, capsys):
    manifest = mpickpt.read_manifest(STEP)
    copied = msgspec.structs.replace(manifest, extra={"tier": {"kind": "object"}})
    store.files[f"run/step-0000000012/{MANIFEST_NAME}"] = dump_manifest(copied)

    _, out, _ = run(capsys, "ls", RUN, "--json")

    assert [entry["tier"] for entry in json.loads(out)] == ["run", "object"]


@pytest.mark.parametrize("command", ["ls", "latest", "verify", "show", "prune"])
def test_url_without_checkpoints_has_a_status_of_its_own(store, command, capsys):
    rule = ["--keep-last", "1"] if command == "prune" else []

    status, out, err = run(capsys, command, f"{URL}/absent", *rule)

    assert status == 4
    assert f"{URL}/absent" in out + err


@pytest.mark.parametrize("command", ["ls", "latest", "verify", "show"])
def test_store_that_refuses_has_a_status_of_its_own(store, command, capsys):
    store.refuse = errno.EACCES

    status, _, err = run(capsys, command, STEP if command == "show" else RUN)

    assert status == 5
    assert "refused" in err


def test_damage_has_a_status_of_its_own(store, capsys):
    damage_flipped(store, shard_name(store, 1))

    assert run(capsys, "verify", STEP)[0] == 3
    status, out, _ = run(capsys, "verify", RUN, "--json")
    assert status == 3
    assert [verdict["status"] for verdict in json.loads(out)] == [0, 3]


def test_prune_removes_what_no_rule_keeps_and_warns(store, capsys):
    status, out, err = run(capsys, "prune", RUN, "--keep-last", "1")

    assert status == 0
    assert "removed 1 of 2 checkpoints" in out
    assert f"{RUN} is in a store, which has no lease" in err
    assert [entry.step for entry in mpickpt.checkpoints(RUN)] == [12]
    assert not [name for name in store.files if "0000000007" in name]


def test_prune_removes_the_manifest_first(store, capsys):
    run(capsys, "prune", RUN, "--keep-last", "1")

    assert store.deleted[0] == "run/step-0000000007/manifest.json"
    assert len(store.deleted) == len(set(store.deleted)) > 3


def test_prune_keeps_the_newest_good_one(store, capsys):
    damage_missing(store, shard_name(store, 0, step=12))

    run(capsys, "prune", RUN, "--keep-last", "1")

    assert [entry.step for entry in mpickpt.checkpoints(RUN)] == [7, 12]


def test_prune_judges_by_the_metrics_of_the_manifests(store, capsys):
    run(capsys, "prune", RUN, "--keep-best", "1:loss:max")

    assert [entry.step for entry in mpickpt.checkpoints(RUN)] == [7, 12]
    run(capsys, "prune", RUN, "--keep-best", "1:loss")
    assert [entry.step for entry in mpickpt.checkpoints(RUN)] == [12]


def test_dry_run_of_prune_removes_nothing_and_warns_of_nothing(store, capsys):
    before = dict(store.files)

    status, out, err = run(capsys, "prune", RUN, "--keep-last", "1", "--dry-run")

    assert (status, err) == (0, "")
    assert "would remove 1 of 2" in out
    assert store.files == before


def test_files_of_others_stay_where_a_checkpoint_is_removed(store, capsys):
    store.files["run/step-0000000007/notes.txt"] = b"mine"

    _, out, _ = run(capsys, "prune", RUN, "--keep-last", "1")

    assert "step-0000000007 stays: it holds files that are not" in out
    assert [n for n in store.files if "0000000007" in n] == [
        "run/step-0000000007/notes.txt"
    ]


def test_rm_removes_a_checkpoint_and_warns(store, capsys):
    status, out, err = run(capsys, "rm", f"{RUN}/step-0000000007")

    assert (status, out) == (0, f"{RUN}/step-0000000007: removed\n")
    assert "no lease" in err
    assert not [name for name in store.files if "0000000007" in name]


def test_rm_refuses_the_newest_good_one_unless_forced(store, capsys):
    status, _, err = run(capsys, "rm", STEP)
    assert status == 2
    assert f"{STEP} is the newest good checkpoint" in err

    assert run(capsys, "rm", STEP, "--force")[0] == 0
    assert [entry.step for entry in mpickpt.checkpoints(RUN)] == [7]


def test_rm_takes_what_an_unfinished_copy_left(store, capsys):
    store.files["run/step-0000000020/rank00000-0123abcd.h5"] = b"1"

    assert run(capsys, "rm", f"{RUN}/step-0000000020")[0] == 0
    assert not [name for name in store.files if "0000000020" in name]


def test_rm_of_nothing_is_no_success(store, capsys):
    assert run(capsys, "rm", f"{RUN}/step-0000000033")[0] == 4


@pytest.mark.parametrize(
    "words", [("pin", 7), ("unpin", 7), ("halt",), ("set-metric", 7, "loss=1")]
)
def test_what_is_kept_in_files_is_refused_for_a_store(store, words, capsys):
    command, *rest = words
    before = dict(store.files)

    status, _, err = run(capsys, command, RUN, *rest)

    assert status == 2
    assert f"{RUN} is in a store, which keeps checkpoints alone" in err
    assert store.files == before


def test_metrics_of_a_checkpoint_in_a_store_cannot_be_set(store):
    with pytest.raises(StorageError, match="is in a store"):
        mpickpt.set_metrics(RUN, 7, {"loss": 1.0})


def test_readers_may_be_many(store):
    failures = []

    def read():
        try:
            assert verify_checkpoint(STEP).is_whole
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not failures


def test_state_of_a_rank_is_as_it_was_saved(store):
    trees = run_ranks(2, lambda comm: mpickpt.load_sharded(STEP, comm=comm))

    for rank, tree in enumerate(trees):
        expected = state_of(rank, 2)
        assert tree["lr"] == expected["lr"]
        assert np.array_equal(tree["b"].data, expected["b"].data)
        assert np.array_equal(tree["chain"].data, expected["chain"].data)

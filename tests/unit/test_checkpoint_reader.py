import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mpickpt
from mpickpt import (
    IncompleteCheckpointError,
    PerRank,
)
from tests.unit.saved_checkpoint import (
    COLUMNS,
    ROWS,
    SHARED,
    SIZE,
    change_manifest,
    save,
)


@pytest.fixture
def checkpoint(saved):
    with mpickpt.open_checkpoint(saved) as opened:
        yield opened


def test_keys_that_only_some_ranks_have_are_found(checkpoint):
    assert checkpoint["stage3/w"][:].tolist() == [3, 3, 3]
    assert checkpoint["stage2", "depth"] == 2
    assert "stage1/w" in checkpoint
    assert "stage4/w" not in checkpoint


def test_keys_lists_arrays_values_and_per_rank_subtrees(checkpoint):
    keys = checkpoint.keys()

    assert {"model/rows", "lr", "names/2/deep/0", "stage3/depth"} <= set(keys)
    assert {"rng", "chain", "bare_rng", "loss"} <= set(keys)
    assert not [key for key in keys if key.startswith("rng/")]
    assert len(keys) == len(set(keys))


def test_plain_values_come_back_as_they_were(checkpoint):
    assert checkpoint["lr"] == 0.1
    assert checkpoint["names"] == ["a", None, {"deep": (1, 2)}]
    assert checkpoint["names/2/deep"] == (1, 2)
    assert checkpoint["options"] == {"depth": 3, "name": "x"}


def test_text_and_int_keys_differ(checkpoint):
    assert checkpoint["a/b", 1] == "int"
    assert checkpoint["a/b", "1"] == "text"
    assert checkpoint["a%2Fb/%31"] == "text"
    assert checkpoint["a/b", ""] == "empty"


def test_int_at_the_root_is_a_key_of_its_own(tmp_path):
    mpickpt.save_sharded({5: "int", "5": "text"}, tmp_path / "c", step=1)

    with mpickpt.open_checkpoint(tmp_path / "c") as checkpoint:
        assert checkpoint[5] == "int"
        assert checkpoint["%35"] == "text"
        with pytest.raises(TypeError):
            checkpoint[None]


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("model/row", "did you mean 'model/rows'"),
        ("model", "load"),
        ("loss", r"per_rank\('loss'\)"),
        ("chain", "per_rank"),
        ("rng", "per_rank"),
        ("rng/state", "per_rank"),
        ("rng/nothing", "no 'rng/nothing'"),
        ("bare_rng", "per_rank"),
        ("a//b", "empty"),
        ((), "load"),
    ],
)
def test_key_that_has_no_one_value_is_refused(checkpoint, key, text):
    with pytest.raises(KeyError, match=text):
        checkpoint[key]


def test_per_rank_gives_what_each_rank_had(checkpoint):
    assert checkpoint.per_rank("loss")[:] == [0.0, 0.5, 1.0, 1.5]
    assert checkpoint.per_rank("chain")[-1].tolist() == [0, 1, 2]
    assert len(checkpoint.per_rank("chain")) == SIZE
    rng = np.random.default_rng(0)
    rng.bit_generator.state = checkpoint.per_rank("rng")[3]
    assert rng.random() == np.random.default_rng(3).random()
    key = checkpoint.per_rank("bare_rng/state/key")[2]
    assert key.tolist() == np.random.RandomState(2).get_state()[1].tolist()


def test_per_rank_gives_the_boxes_of_sharded_arrays(checkpoint):
    np.testing.assert_array_equal(
        checkpoint.per_rank("model/columns")[1], COLUMNS[:, 7:14]
    )
    assert [p.tolist() for p in checkpoint.per_rank("pieces")[3]] == [[3, 3], [3]]


def test_per_rank_of_a_rank_without_the_key_is_refused(checkpoint):
    values = checkpoint.per_rank("stage2/depth")

    assert values[2] == 2
    with pytest.raises(KeyError, match="rank 1 has no 'stage2/depth'"):
        values[1]
    with pytest.raises(IndexError, match="saved by 4 ranks"):
        values[4]


def test_load_gives_plain_containers(checkpoint):
    state = checkpoint.load()

    np.testing.assert_array_equal(state["model"]["rows"], ROWS)
    np.testing.assert_array_equal(state["model"]["columns"], COLUMNS)
    np.testing.assert_array_equal(state["shared"], SHARED)
    assert state["scalar"].shape == ()
    assert state["stage2"] == {"w": pytest.approx(np.full(3, 2)), "depth": 2}
    assert state["loss"] == [0.0, 0.5, 1.0, 1.5]
    assert [chain.tolist() for chain in state["chain"]] == [[], [0], [0, 1], [0, 1, 2]]
    assert state["rng"][2]["bit_generator"] == "PCG64"
    assert len(state["bare_rng"]) == SIZE
    assert state["names"] == ["a", None, {"deep": (1, 2)}]


def test_load_gives_a_subtree(checkpoint):
    assert set(checkpoint.load("model")) == {"rows", "columns"}
    assert checkpoint.load("adam").tolist() == [1, 2, 2, 3, 3, 3]
    assert checkpoint.load(("names", 2)) == {"deep": (1, 2)}
    assert len(checkpoint.load("rng/state/state")) == SIZE
    with pytest.raises(KeyError):
        checkpoint.load("nothing")


def test_everything_is_found_without_a_layout_file(copied):
    change_manifest(copied, layout=None)

    with mpickpt.open_checkpoint(copied) as checkpoint:
        np.testing.assert_array_equal(checkpoint["model/columns"][3:9], COLUMNS[3:9])
        np.testing.assert_array_equal(checkpoint.load()["model"]["rows"], ROWS)


def test_everything_is_found_with_a_damaged_layout_file(copied, caplog):
    layout = copied / mpickpt.read_manifest(copied).layout.path
    layout.write_bytes(bytes(layout.stat().st_size))

    with mpickpt.open_checkpoint(copied) as checkpoint:
        np.testing.assert_array_equal(checkpoint["model/columns"][3:9], COLUMNS[3:9])

    assert "layout" in caplog.text


def test_layout_file_saves_opening_the_other_shards(copied):
    for shard in mpickpt.read_manifest(copied).shards[1:]:
        (copied / shard.path).unlink()

    with mpickpt.open_checkpoint(copied) as checkpoint:
        np.testing.assert_array_equal(checkpoint["model/rows"][2:9], ROWS[2:9])
        with pytest.raises(IncompleteCheckpointError, match="is missing"):
            checkpoint["model/rows"][2:11]


def test_lists_that_differ_between_ranks_are_lists_over_ranks(tmp_path):
    def state(rank):
        return {"layers": [PerRank(np.full(2, rank))] * (rank + 1)}

    save(tmp_path / "c", 2, state)

    with mpickpt.open_checkpoint(tmp_path / "c") as checkpoint:
        first, second = checkpoint.load("layers")
        assert (len(first), len(second)) == (1, 2)
        assert second[1].tolist() == [1, 1]


def test_one_rank_has_values_of_its_own_without_per_rank(tmp_path):
    path = tmp_path / "c"
    state = {"x": np.arange(6), "mine": PerRank({"a": np.arange(3), "b": 5})}
    mpickpt.save_sharded(state, path, step=1)

    with mpickpt.open_checkpoint(path) as checkpoint:
        assert checkpoint["x"][::2].tolist() == [0, 2, 4]
        assert checkpoint["mine/a"][1:].tolist() == [1, 2]
        assert checkpoint["mine/b"] == 5
        assert checkpoint.load()["mine"][0]["b"] == 5
        assert checkpoint.keys() == ["x", "mine"]


@pytest.mark.parametrize("value", [np.arange(3), 5, [], {}], ids=repr)
def test_state_that_is_one_leaf_is_read_by_the_empty_path(tmp_path, value):
    mpickpt.save_sharded(value, tmp_path / "c", step=1)

    with mpickpt.open_checkpoint(tmp_path / "c") as checkpoint:
        found = checkpoint.load()
        assert np.array_equal(found, value)
        assert checkpoint.keys() == ["%root"]
        assert np.array_equal(np.asarray(checkpoint["%root"]), np.asarray(value))


def test_closed_checkpoint_is_refused(saved):
    with mpickpt.open_checkpoint(saved) as checkpoint:
        array = checkpoint["model/rows"]

    with pytest.raises(ValueError, match="closed"):
        array[0]


def test_reading_imports_neither_mpi_nor_hdf5(saved):
    program = (
        "import sys, mpickpt\n"
        f"with mpickpt.open_checkpoint({str(saved)!r}) as c: c.load()\n"
        "assert not {'h5py', 'mpi4py', 'rich'} & set(sys.modules)\n"
    )

    root = Path(mpickpt.__file__).parents[1]
    subprocess.run([sys.executable, "-c", program], check=True, cwd=root, timeout=30)


def test_pieces_are_whole_arrays_in_few_bytes_at_a_time(checkpoint):
    keys = ["model/rows", ("model", "columns"), "shared"]
    shapes = {key: checkpoint[key].shape for key in ("model/rows", "model/columns")}
    found = {key: np.full(shape, -1.0) for key, shape in shapes.items()}
    shared = []

    for key, box, elements in checkpoint.pieces(keys):
        if key in found:
            found[key][box.slices()] = elements
        else:
            shared.append((box.offset, elements))

    np.testing.assert_array_equal(found["model/rows"], ROWS)
    np.testing.assert_array_equal(found["model/columns"], COLUMNS)
    whole = [elements for _, elements in sorted(shared, key=lambda pair: pair[0])]
    np.testing.assert_array_equal(np.concatenate(whole), SHARED)


@pytest.mark.parametrize("key", ["lr", "nothing", "chain"])
def test_pieces_of_what_is_not_one_array_are_an_error(checkpoint, key):
    with pytest.raises(KeyError, match=repr(key)):
        list(checkpoint.pieces([key]))

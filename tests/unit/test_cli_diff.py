import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from mpickpt import PerRank, Replicated, Sharded
from tests.unit.cli_runs import flip_byte_of_shard, run, save


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return save(tmp_path_factory.mktemp("plain") / "a")


def test_diff_of_equal_states_is_silent_whatever_the_ranks(tmp_path, capsys):
    def drop_chain(state, rank):
        del state["chain"]

    a = save(tmp_path / "a", size=2, change=drop_chain)
    b = save(tmp_path / "b", size=4, change=drop_chain)

    assert run(capsys, "diff", a, b) == (0, "", "")


def change_element(state, rank):
    array = state["model"]["w"]
    changed = array.data.copy()
    changed[1, 2] = np.nan
    state["model"]["w"] = Sharded(
        changed, global_shape=array.global_shape, offset=array.offset
    )


def change_plain(state, rank):
    state["lr"] = 1


def change_one_rank(state, rank):
    state["lr"] = 0.5 + rank


def add_key(state, rank):
    state["new"] = None


def change_dtype(state, rank):
    state["b"] = Replicated(np.array([1, 2], "i4"))


def change_per_rank(state, rank):
    state["chain"] = PerRank(np.arange(rank + 1) + rank)


def grow_per_rank(state, rank):
    state["chain"] = PerRank(np.arange(2))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (change_element, "model/w[1, 2]: array: 5.0 | nan"),
        (change_plain, "lr: value: 0.5 | 1"),
        (change_one_rank, "lr: value: 0.5 | 0.5, 1.5 on rank 1"),
        (add_key, "new: only in one: absent | None"),
        (
            change_dtype,
            "b: type: replicated int16 (2,) | replicated int32 (2,)",
        ),
        (change_per_rank, "chain[0] of rank 1: array: 0 | 1"),
        (grow_per_rank, "chain of rank 0: type: int64 (1,) | int64 (2,)"),
    ],
)
def test_diff_names_the_first_difference(plain, tmp_path, change, line, capsys):
    other = save(tmp_path / "b", change=change)

    status, out, _ = run(capsys, "diff", plain, other)

    assert (status, out.splitlines()) == (3, [line])


def test_diff_prints_json(plain, tmp_path, capsys):
    other = save(tmp_path / "b", change=change_element)

    _, out, _ = run(capsys, "diff", plain, other, "--json")

    assert json.loads(out) == [
        {
            "key": "model/w",
            "what": "array",
            "a": "5.0",
            "b": "nan",
            "index": [1, 2],
            "rank": None,
        }
    ]


def test_diff_refuses_damaged_bytes(plain, tmp_path, capsys):
    damaged = Path(shutil.copytree(plain, tmp_path / "b"))
    flip_byte_of_shard(damaged)

    status, _, err = run(capsys, "diff", plain, damaged)

    assert status == 3
    assert "is damaged" in err


def test_diff_tells_integers_that_python_does_not_write(tmp_path, capsys):
    a = save(tmp_path / "a", change=lambda state, rank: state.update(lr=10**5000))
    b = save(tmp_path / "b", change=lambda state, rank: state.update(lr=10**5001))

    status, out, _ = run(capsys, "diff", a, b)

    assert status == 3
    assert out.startswith("lr: value: 0x")

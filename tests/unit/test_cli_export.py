import shutil
from pathlib import Path

import numpy as np
import pytest

import mpickpt
from tests.unit.cli_runs import MATRIX, flip_byte_of_shard, run, save


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save(tmp_path_factory.mktemp("saved") / "run")


@pytest.fixture
def checkpoint(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "run"))


def test_export_writes_what_numpy_reads(checkpoint, tmp_path, capsys):
    target = tmp_path / "w.npy"
    target.write_text("old")

    status, _, _ = run(capsys, "export", checkpoint, "model/w", "-o", target)

    np.testing.assert_array_equal(np.load(target), MATRIX)
    assert status == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "w.npy"]


@pytest.mark.parametrize(
    "array",
    [
        np.array(2.5),
        np.empty((0, 3)),
        np.array([1, 2], ">i8"),
        np.array([1, 2], np.longdouble),
        np.array(["ab", "c"], "U3"),
        np.array(["2020-01-01"], "M8[s]"),
        np.array([True]),
    ],
    ids=lambda array: array.dtype.str,
)
def test_export_keeps_the_dtype(tmp_path, array, capsys):
    mpickpt.save_sharded({"x": array}, tmp_path / "c", step=1)

    run(capsys, "export", tmp_path / "c", "x", "-o", tmp_path / "x.npy")

    found = np.load(tmp_path / "x.npy")
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(found, array)


def test_export_of_bfloat16_asks_for_another_dtype(tmp_path, capsys):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.array([1.5, -2], ml_dtypes.bfloat16)
    mpickpt.save_sharded({"x": array}, tmp_path / "c", step=1)
    arguments = ("export", tmp_path / "c", "x", "-o", tmp_path / "x.npy")

    status, _, err = run(capsys, *arguments)

    assert (status, "--as uint16" in err) == (2, True)
    assert run(capsys, *arguments, "--as", "uint16")[0] == 0
    assert np.array_equal(np.load(tmp_path / "x.npy").view(array.dtype), array)
    assert run(capsys, *arguments, "--as", "uint32")[0] == 2
    assert run(capsys, *arguments, "--as", "nonsense")[0] == 2


def test_export_takes_the_array_of_one_rank(checkpoint, tmp_path, capsys):
    target = tmp_path / "x.npy"

    assert run(capsys, "export", checkpoint, "chain", "-o", target)[0] == 2
    assert run(capsys, "export", checkpoint, "chain", "-o", target, "--rank", 1)[0] == 0
    assert np.load(target).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("key", "rank"), [("nothing", None), ("lr", None), ("model", None), ("chain", 9)]
)
def test_export_of_what_is_no_array_is_wrong_usage(
    checkpoint, tmp_path, key, rank, capsys
):
    options = [] if rank is None else ["--rank", rank]

    status, _, err = run(
        capsys, "export", checkpoint, key, "-o", tmp_path / "x.npy", *options
    )

    assert status == 2
    assert err.startswith("mpickpt: ")
    assert not (tmp_path / "x.npy").exists()


def test_export_of_damaged_bytes_leaves_nothing(checkpoint, tmp_path, capsys):
    flip_byte_of_shard(checkpoint)

    status, _, _ = run(
        capsys, "export", checkpoint, "model/w", "-o", tmp_path / "x.npy"
    )

    assert status == 3
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_export_to_where_one_may_not_write_is_unreadable(checkpoint, capsys):
    status, _, err = run(
        capsys, "export", checkpoint, "model/w", "-o", "/proc/nowhere/x.npy"
    )

    assert (status, "cannot create" in err) == (5, True)

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import mpickpt
from mpickpt.format.digest import BLOCK_NBYTES
from mpickpt.storage.shard_file import ShardFile
from tests.unit.saved_checkpoint import COLUMNS, ROWS, save


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "step-0000000007"
    save(path)
    return path


@pytest.fixture
def checkpoint(saved):
    with mpickpt.open_checkpoint(saved) as opened:
        yield opened


@pytest.mark.parametrize(
    "index",
    [
        ...,
        0,
        -1,
        (3, 4),
        (np.int64(3), ...),
        slice(5, 25, 3),
        slice(None, None, -1),
        (slice(30, 2, -7), slice(None, None, -3)),
        (..., 5),
        (slice(9, 11), slice(3, 3)),
        slice(100, 200),
        [3, 39, 3, -1],
        (slice(None), np.arange(28) % 3 == 0),
        (slice(2, 9), [0, 5]),
        np.zeros(40, bool),
        [],
        (),
    ],
)
@pytest.mark.parametrize("key", ["model/rows", "model/columns"])
def test_array_is_indexed_as_numpy_does(checkpoint, key, index):
    expected = {"model/rows": ROWS, "model/columns": COLUMNS}[key][index]

    found = checkpoint[key][index]

    np.testing.assert_array_equal(found, expected)
    assert (np.shape(found), found.dtype) == (expected.shape, expected.dtype)


@given(
    st.tuples(
        st.slices(40) | st.integers(-40, 39), st.slices(28) | st.integers(-28, 27)
    )
)
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@example((slice(None, None, -39), slice(27, None, -27)))
def test_slices_of_two_axes_equal_numpys(checkpoint, index):
    np.testing.assert_array_equal(checkpoint["model/columns"][index], COLUMNS[index])


@pytest.mark.parametrize(
    ("index", "error"),
    [
        (None, TypeError),
        (True, TypeError),
        ("x", TypeError),
        (1.0, TypeError),
        ([[0, 1]], TypeError),
        ([0.5], TypeError),
        (([0], [1]), TypeError),
        ((0, [1]), TypeError),
        (40, IndexError),
        (-41, IndexError),
        ([40], IndexError),
        ((0, 0, 0), IndexError),
        ((..., ...), IndexError),
        ([True], IndexError),
    ],
)
def test_index_that_cannot_be_is_refused(checkpoint, index, error):
    with pytest.raises(error):
        checkpoint["model/rows"][index]


def test_array_tells_what_it_is(checkpoint):
    array = checkpoint["model", "columns"]

    assert (array.shape, array.ndim, array.size, len(array)) == ((40, 28), 2, 1120, 40)
    assert (array.dtype, array.kind, array.nbytes) == (np.dtype(">i8"), "sharded", 8960)
    assert array.key == "model/columns"
    assert checkpoint["shared"].kind == "replicated"
    assert [row[0] for row in array][:2] == [0, 28]


def test_numpy_takes_an_array_as_one(checkpoint):
    assert np.asarray(checkpoint["shared"], "f4").dtype == np.dtype("f4")
    assert np.sum(checkpoint["model/rows"]) == ROWS.sum()
    with pytest.raises(ValueError, match="uncopied"):
        checkpoint["shared"].__array__(copy=False)


def test_array_without_axes_or_elements_is_read(checkpoint):
    assert checkpoint["scalar"][()] == 2.5
    assert checkpoint["scalar"][...].shape == ()
    assert checkpoint["empty"][:, 1].shape == (0,)
    with pytest.raises(TypeError, match="no axes"):
        len(checkpoint["scalar"])


def test_blocks_and_pieces_are_assembled(checkpoint):
    assert checkpoint["adam"][:].tolist() == [1, 2, 2, 3, 3, 3]
    assert checkpoint["pieces"][:].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 0, 1, 2, 3]


def test_read_into_fills_an_array_of_the_caller(checkpoint):
    out = np.zeros(COLUMNS.shape, COLUMNS.dtype)

    checkpoint.read_into("model/columns", out)

    np.testing.assert_array_equal(out, COLUMNS)
    with pytest.raises(ValueError, match="does not fit"):
        checkpoint.read_into("model/columns", out.astype("i8"))
    with pytest.raises(KeyError):
        checkpoint.read_into("lr", out)


@pytest.mark.parametrize(
    "array",
    [
        np.array([1, 2], np.longdouble),
        np.array([1 + 2j], np.clongdouble),
        np.array(["2020-01-01", "NaT"], "M8[s]"),
        np.array(["ab", "c"], ">U3"),
        np.array([b"ab", b""], "S2"),
        np.array([True, False]),
        np.array(["äö"], "U2").reshape(()),
    ],
    ids=lambda array: array.dtype.str,
)
def test_dtype_comes_back(tmp_path, array):
    mpickpt.save_sharded({"x": array}, tmp_path / "c", step=1)

    with mpickpt.open_checkpoint(tmp_path / "c") as checkpoint:
        found = checkpoint["x"][...]

    assert found.dtype == array.dtype
    assert np.array_equal(found, array, equal_nan=array.dtype.kind in "Mm")


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Three blocks and a bit of one array."""
    path = tmp_path_factory.mktemp("large") / "c"
    array = np.arange(13 << 20, dtype="f4").reshape(-1, 1024)
    mpickpt.save_sharded({"x": array, "y": np.arange(3)}, path, step=1)
    return path


def test_slice_reads_just_the_blocks_it_touches(large, monkeypatch):
    read = []
    original = ShardFile.read_at

    def counted(file, view, offset):
        read.append((offset, len(view)))
        original(file, view, offset)

    with mpickpt.open_checkpoint(large) as checkpoint:
        array = checkpoint["x"]
        monkeypatch.setattr(ShardFile, "read_at", counted)
        rows = array[6000:6002]
        again = array[6000:6002]

    blocks = [n for _, n in read if n == BLOCK_NBYTES]
    assert len(blocks) == 1
    assert rows[1, 5] == 6001 * 1024 + 5
    np.testing.assert_array_equal(rows, again)

"""What FORMAT.md says is true: a reader made from it reads what is written."""

import hashlib
import re
from pathlib import Path

import h5py
import numpy as np
import pytest

import mpickpt
from mpickpt import PerRank, Replicated, load_sharded, open_checkpoint, save_sharded
from mpickpt.format.naming import key_of
from tests.golden import read_by_format

pytest.importorskip("ml_dtypes", "0.5")

from tests.golden import make_v1, state_v1

FORMAT = Path(mpickpt.__file__).parent / "format" / "FORMAT.md"
MIB = 1 << 20


def as_read_by_format(array):
    """Return an array in the type that the other reader gives for it."""
    name = array.dtype.name
    if name == "float8_e5m2":
        return array.astype(np.float16)
    if "float8" in name or name == "bfloat16":
        return array.astype(np.float32)
    return array


def test_reader_made_from_the_text_reads_every_array():
    manifest, arrays, _ = read_by_format.read_checkpoint(make_v1.V1)

    assert len(arrays) == len(manifest["arrays"])
    with open_checkpoint(make_v1.V1) as checkpoint:
        for record in manifest["arrays"]:
            key = record["key"]
            if record["kind"] == "per_rank":
                continue
            expected = as_read_by_format(checkpoint[key][...])
            if expected.size:
                assert arrays[key].dtype == expected.dtype
                np.testing.assert_array_equal(arrays[key], expected)


def test_reader_made_from_the_text_reads_what_each_rank_has():
    _, arrays, trees = read_by_format.read_checkpoint(make_v1.V1)

    for rank, tree in enumerate(trees):
        own = state_v1.state(rank)["own"].data
        assert tree["own"]["rank"] == rank
        assert tree["own"]["chain"] == ("array", "own/chain")
        np.testing.assert_array_equal(arrays["own/chain"][rank], own["chain"])
        assert arrays["own/nothing"][rank].shape == (0, rank)
    assert arrays["own/only_here/on1"].keys() == {1}


def test_reader_made_from_the_text_reads_plain_values():
    _, _, trees = read_by_format.read_checkpoint(make_v1.V1)

    plain, saved = trees[0]["plain"], state_v1.plain_values()
    assert plain.pop("record") == {"low": -1.0, "high": [None, {"x": 1, "y": 2}]}
    assert plain.pop("scalars")[:4] == saved.pop("scalars")[:4]
    del saved["record"]
    assert repr(plain) == repr(saved)
    assert trees[0]["odd"]["values"] == dict.fromkeys(state_v1.ODD_NAMES, "odd")
    assert trees[0]["odd"]["numbers"][1] == "int"


def test_reader_made_from_the_text_reads_long_doubles():
    _, arrays, _ = read_by_format.read_checkpoint(make_v1.V1_X87)

    numbers = np.array([0.0, -0.0, 1.5, np.inf, -np.inf, np.nan])
    for name in ("little", "big"):
        plain, thirds, complex_ = (arrays[f"{name}/{i}"] for i in range(3))
        np.testing.assert_array_equal(plain, numbers)
        np.testing.assert_array_equal(np.signbit(plain), np.signbit(numbers))
        np.testing.assert_allclose(thirds, numbers / 3, rtol=1e-16)
        np.testing.assert_array_equal(complex_.real, numbers)


def test_reader_made_from_the_text_reads_shards_of_several_blocks(tmp_path):
    array = np.arange(5 * MIB, dtype=np.int64)
    save_sharded({"x": PerRank(array), "y": Replicated(array[:7])}, tmp_path, step=0)

    manifest, arrays, _ = read_by_format.read_checkpoint(tmp_path)

    assert manifest["shards"][0]["nbytes"] > 2 * 16 * MIB
    np.testing.assert_array_equal(arrays["x"][0], array)


@pytest.mark.parametrize("change", [1, 0x80])
def test_reader_made_from_the_text_finds_a_flipped_bit(change, tmp_path):
    save_sharded({"x": 1}, tmp_path, step=0)
    (shard,) = tmp_path.glob("rank*.h5")
    content = bytearray(shard.read_bytes())
    content[-1] ^= change
    shard.write_bytes(content)

    with pytest.raises(AssertionError):
        read_by_format.read_checkpoint(tmp_path)


def test_example_in_the_text_is_the_file():
    text = FORMAT.read_text(encoding="utf-8")
    (shard,) = make_v1.V1_EXAMPLE.glob("rank*.h5")
    content = shard.read_bytes()

    lines = re.findall(r"^([0-9a-f]{8}): ((?:[0-9a-f]{2,4} )+)", text, re.MULTILINE)

    assert len(lines) > 30
    for place, digits in lines:
        row = bytes.fromhex(digits)
        assert content[int(place, 16) :][: len(row)] == row
    assert (make_v1.V1_EXAMPLE / "manifest.json").read_text() in text
    assert shard.name in text


def test_keys_in_the_text_are_those_of_the_code():
    text = FORMAT.read_text(encoding="utf-8")
    examples = {
        ("layers", "0"): "layers/%30",
        ("a/b",): "a%2Fb",
        (-7,): "-7",
        ("-7",): "%2D7",
        ("%2F",): "%252F",
        ("",): "%empty",
        ("%empty",): "%25empty",
        (".",): "%2E",
        ("..",): "%2E.",
        ("..x",): "..x",
        ("a\x00b",): "a%00b",
        ("\ud800",): "%ED%A0%80",
        (): "%root",
    }

    for path, key in examples.items():
        assert key_of(path) == key
        assert f"`{key}`" in text


def test_layout_file_has_the_name_that_the_text_gives():
    for path in make_v1.SAVERS:
        (layout,) = path.glob("layout-*.h5")
        digest = hashlib.sha256(layout.read_bytes()).hexdigest()
        assert layout.name == f"layout-{digest[:16]}.h5"


@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.0.0", reason="32 axes")
def test_dataset_of_more_axes_than_hdf5_has_is_flat(tmp_path):
    array = np.arange(6).reshape((1,) * 32 + (2, 3))
    save_sharded({"x": Replicated(array)}, tmp_path, step=0)

    (shard,) = tmp_path.glob("rank*.h5")

    with h5py.File(shard) as file:
        assert file["x"].shape == (6,)
    np.testing.assert_array_equal(load_sharded(tmp_path)["x"].data, array)
    np.testing.assert_array_equal(
        read_by_format.read_checkpoint(tmp_path)[1]["x"], array
    )


def test_arrays_without_elements_have_a_dataset(tmp_path):
    empty = np.zeros((0, 2))
    save_sharded({"a": Replicated(empty), "b": PerRank(empty)}, tmp_path, step=0)

    (shard,) = tmp_path.glob("rank*.h5")

    with h5py.File(shard) as file:
        assert set(file) == {"a", "b", "%mpickpt"}
        assert file["a"].shape == file["b"].shape == (0, 2)


def test_empty_state_is_read_by_both(tmp_path):
    save_sharded({}, tmp_path, step=0)

    assert read_by_format.read_checkpoint(tmp_path)[1:] == ({}, [{}])
    assert load_sharded(tmp_path) == {}

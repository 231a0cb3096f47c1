"""Every plain value, container and record comes back."""

import collections
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpickpt import (
    AsSaved,
    PerRank,
    Replicated,
    Sharded,
    load_sharded,
    save_sharded,
)
from mpickpt.format.tree import MAX_DEPTH
from tests.states import (
    arrays_in,
    image_of,
    on_ranks,
)

PLAIN_VALUES = {
    "none": None,
    "booleans": [True, False],
    "small ints": [0, -1, 2**53, -(2**53), 2**53 + 1, 2**63, -(2**63) - 1],
    "huge ints": [10**400, -(10**400), 1 << 20_000],
    "floats": [0.0, -0.0, 0.1, 5e-324, 1.7976931348623157e308],
    "not finite": [float("nan"), -float("nan"), float("inf"), -float("inf")],
    "complex": [1j, complex(-0.0, float("nan")), complex(float("inf"), -0.0)],
    "text": ["", "a", "ä€😀", "\0", "a\0b", "\x1f\x7f\u2028", "\ufeff", "\n\r\t"],
    "surrogates": ["\ud800", "a\udfffb", "\udcff/\ud800"],
    "looks like ours": ["$int", "$array", "%root", "%mpickpt"],
    "bytes": [b"", b"\0\xff", bytes(range(256)) * 9],
    "nested": [[], (), {}, [[]], ((),), [({},)], ([1, (2, {"a": [3]})],)],
    "one tag in a dict": {"$int": "0x1"},
    "tags in a dict": {"$array": 0, "$per_rank": [None, None]},
    "numpy scalars": [
        *(np.dtype(kind).type(1) for kind in "?bBhHiIlLqQefdgFDG"),
        np.float64("nan"),
        np.longdouble(1) / 3,
        np.datetime64("2026-01-31T12:00", "m"),
        np.datetime64("NaT"),
        np.timedelta64(-5, "ns"),
        np.str_("abc"),
        np.bytes_(b"ab\0c"),
    ],
    "empty numpy text": [np.str_(""), np.bytes_(b"")],
}
KEYS = {
    "int beside its text": {1: "int", "1": "text"},
    "negative int": {-1: 0, "-1": 1, 0: 2, "00": 3, 10**30: 4},
    "empty": {"": 0},
    "dots": {".": 0, "..": 1, "...": 2, ".a": 3},
    "slashes": {"/": 0, "a/b": 1, "a": {"b": 2}, "//": 3, "/a": 4},
    "percent": {"%": 0, "%2F": 1, "%root": 2, "%empty": 3, "%mpickpt": 4},
    "unicode": {"ä": 0, "a\u0308": 1, "😀": 2, "\ud800": 3},
    "control": {"\0": 0, "a\0b": 1, "\n": 2, "\x7f": 3},
    "dollar": {"$array": 0, "$": 1},
    "nested empties": {"": {"": {"": 0}}},
}


def reloaded(state, path, **options):
    save_sharded(state, path, step=1)
    return load_sharded(path, **options)


@pytest.mark.parametrize("name", PLAIN_VALUES)
def test_plain_value_comes_back(tmp_path, name):
    state = {"x": PLAIN_VALUES[name]}

    loaded = reloaded(state, tmp_path / "c")

    assert image_of(loaded) == image_of(state)


@pytest.mark.parametrize("wrapper", [Replicated, PerRank])
@pytest.mark.parametrize("name", PLAIN_VALUES)
def test_plain_value_comes_back_inside_a_wrapper(tmp_path, name, wrapper):
    def save_and_load(comm):
        save_sharded(
            {"x": wrapper(PLAIN_VALUES[name])}, tmp_path / "c", step=1, comm=comm
        )
        return image_of(load_sharded(tmp_path / "c", comm=comm))

    loaded = on_ranks(2, save_and_load)

    assert loaded == [image_of({"x": wrapper(PLAIN_VALUES[name])})] * 2


@pytest.mark.parametrize("name", PLAIN_VALUES)
def test_plain_value_replaces_any_other_of_like(tmp_path, name):
    state = {"x": PLAIN_VALUES[name], "y": 1}
    save_sharded(state, tmp_path / "c", step=1)

    for other in (None, 0, "text", [1, 2, 3], (), {}):
        loaded = load_sharded(tmp_path / "c", like={"x": other, "y": 2})

        assert image_of(loaded) == image_of(state)


@pytest.mark.parametrize("name", KEYS)
def test_key_of_plain_values_comes_back(tmp_path, name):
    loaded = reloaded(KEYS[name], tmp_path / "c")

    assert image_of(loaded) == image_of(KEYS[name])


def with_arrays(tree, number=None):
    number = number or itertools.count()
    if isinstance(tree, dict):
        return {key: with_arrays(child, number) for key, child in tree.items()}
    return Replicated(np.array([next(number)]))


@pytest.mark.parametrize("name", KEYS)
def test_key_of_arrays_comes_back_with_its_own_array(tmp_path, name):
    state = with_arrays(KEYS[name])
    like = with_arrays(KEYS[name], itertools.repeat(-1))

    loaded = reloaded(state, tmp_path / "c")
    filled = load_sharded(tmp_path / "c", like=like)

    assert image_of(loaded) == image_of(state)
    assert image_of(filled) == image_of(state)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.binary()
    | st.text(st.characters(codec=None)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(
            st.integers() | st.text(st.characters(codec=None)), inner, max_size=3
        )
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=30, derandomize=True)
@given(values)
def test_any_plain_tree_comes_back(tmp_path_factory, state):
    path = tmp_path_factory.mktemp("tree") / "c"

    loaded = reloaded(state, path)

    assert image_of(loaded) == image_of(state)


@pytest.mark.parametrize(
    "root",
    [
        Replicated(np.arange(3)),
        PerRank(np.arange(3)),
        Sharded(np.arange(3), (3,), (0,)),
        Sharded.pieces([((0,), np.arange(2))], global_shape=(2,)),
        Replicated([1, np.arange(2)]),
        7,
        None,
        [],
        {},
    ],
    ids=lambda root: type(root).__name__,
)
def test_state_may_be_a_single_value(tmp_path, root):
    loaded = reloaded(root, tmp_path / "c")
    again = load_sharded(tmp_path / "c", like=AsSaved)

    if isinstance(root, Sharded) and root.boxes:
        root = Sharded(root.boxes[0][1], root.global_shape, root.boxes[0][0])
    assert image_of(loaded) == image_of(root)
    assert image_of(again) == image_of(root)


def test_bare_array_of_one_rank_comes_back_bare(tmp_path):
    state = {"x": np.arange(3), "y": [np.ones(2), 1]}
    like = {"x": np.zeros(3, int), "y": [np.zeros(2), 0]}

    loaded = reloaded(state, tmp_path / "c")
    filled = load_sharded(tmp_path / "c", like=like)

    assert image_of(loaded) == image_of(state)
    assert image_of(filled) == image_of(state)
    assert filled["x"] is like["x"]


def test_wrapper_of_a_subtree_applies_to_each_array(tmp_path):
    start = np.arange(4.0)
    state = {
        "sharded": Sharded({"m": start, "v": [start + 1]}, (4,), (0,)),
        "block": Sharded.block({"m": start}),
        "replicated": Replicated({"a": start, "b": [start, None, "text"]}, "full"),
        "per_rank": PerRank({"a": start, "n": 3}, "modulo"),
    }
    expected = {
        "sharded": {
            "m": Sharded(start, (4,), (0,)),
            "v": [Sharded(start + 1, (4,), (0,))],
        },
        "block": {"m": Sharded(start, (4,), (0,))},
        "replicated": state["replicated"],
        "per_rank": state["per_rank"],
    }

    loaded = reloaded(state, tmp_path / "c")

    assert image_of(loaded) == image_of(expected)


def test_array_without_pieces_can_be_saved_again(tmp_path):
    state = {"x": Sharded.pieces([], global_shape=(3, 0), dtype="f4")}

    save_sharded(state, tmp_path / "a", step=1)
    for like in (None, state, {"x": Sharded.pieces([], global_shape=(3, 0))}):
        loaded = load_sharded(tmp_path / "a", like=like)
        save_sharded(loaded, tmp_path / "b", step=1, overwrite=True)

        assert loaded["x"].boxes == ()
        assert loaded["x"].dtype == np.float32


def test_matrix_comes_back(tmp_path):
    # Never flat, whatever its reshape is asked for.
    matrix = np.arange(6.0).reshape(2, 3).view(np.matrix)
    state = {"x": PerRank([matrix, matrix.T])}
    target = {"x": PerRank([np.zeros_like(matrix), np.zeros_like(matrix.T)])}

    save_sharded(state, tmp_path / "c", step=1)
    loaded = load_sharded(tmp_path / "c")
    load_sharded(tmp_path / "c", like=target)

    expected = [matrix.tolist(), matrix.T.tolist()]
    assert [array.tolist() for array in loaded["x"].data] == expected
    assert [array.tolist() for array in target["x"].data] == expected


def test_dict_subclasses_come_back_as_dicts(tmp_path):
    state = {
        "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
        "default": collections.defaultdict(list, {"x": [1]}),
    }

    loaded = reloaded(state, tmp_path / "c")

    assert image_of(loaded) == image_of(
        {"ordered": {"b": 1, "a": 2}, "default": {"x": [1]}}
    )
    assert list(loaded["ordered"]) == ["b", "a"]


@pytest.mark.parametrize("key", ["d", 1, "$d", None])
def test_deep_state_comes_back(tmp_path, key):
    state: Any = np.arange(3)
    for _ in range(MAX_DEPTH):
        state = [state] if key is None else {key: state}

    loaded = reloaded(state, tmp_path / "c")

    for _ in range(MAX_DEPTH):
        loaded = loaded[0 if key is None else key]
    assert loaded.tolist() == [0, 1, 2]


def test_save_reads_no_more_than_it_was_given(tmp_path):
    state = {"x": Replicated(np.arange(4)), "y": [1, {"a": (2,)}]}
    before = image_of(state)

    save_sharded(state, tmp_path / "c", step=1)

    assert image_of(state) == before
    assert len(arrays_in(state)) == 1

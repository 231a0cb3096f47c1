import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpickpt.errors import ManifestError
from mpickpt.format.layout_document import (
    LayoutEntry,
    dump_layout_document,
    parse_layout_document,
)
from mpickpt.planning.layout import entry_of
from mpickpt.planning.resolve import resolve_array
from tests.unit.layouts import block, box, of_kind, replicated, sharded


def some_entries():
    layouts = [
        resolve_array("w", [(0, block(3, 2)), (1, block(2, 2))]),
        resolve_array("empty", [(0, sharded((0,), box((0, 0))))]),
        resolve_array("é", [(r, replicated(())) for r in range(3)]),
        resolve_array("rng", [(r, of_kind("per_rank", "int8")) for r in range(9)]),
        resolve_array("odd", [(r, of_kind("per_rank", "int8")) for r in (0, 1, 7)]),
        resolve_array("lr", [(0, of_kind("replicated_plain"))]),
    ]
    return [entry_of(layout) for layout in layouts]


def test_layout_document_comes_back_sorted_by_key():
    entries = some_entries()

    parsed = parse_layout_document(dump_layout_document(entries), "layout.h5")

    assert parsed == sorted(entries, key=lambda entry: entry.key)


def test_layout_document_has_one_array_a_line():
    text = dump_layout_document(some_entries()).decode()

    assert text == (
        '{"arrays":[\n'
        '{"dtype":"float32","global_shape":[0],"key":"empty","kind":"sharded"},\n'
        '{"dtype":"","key":"lr","kind":"replicated_plain","parts":[[0,[],[]]]},\n'
        '{"dtype":"int8","key":"odd","kind":"per_rank","ranks":[0,1,7]},\n'
        '{"dtype":"int8","key":"rng","kind":"per_rank","rank_range":[0,9,1]},\n'
        '{"dtype":"float32","global_shape":[5,2],"key":"w","kind":"sharded",'
        '"parts":[[0,[0,0],[3,2]],[1,[3,0],[2,2]]]},\n'
        '{"dtype":"float32","global_shape":[],"key":"é","kind":"replicated",'
        '"parts":[[1,[],[]]]}\n'
        '],"schema_version":1}\n'
    )


def test_layout_document_may_be_empty_or_padded():
    assert parse_layout_document(dump_layout_document([]) + b"  \n", "here") == []


def test_parse_refuses_a_newer_layout_before_all_else():
    with pytest.raises(ManifestError, match=r"layout\.h5.*schema 2.*upgrade"):
        parse_layout_document(b'{"schema_version":2,"arrays":7}', "layout.h5")


GOOD = {
    "dtype": "int8",
    "global_shape": [4],
    "key": "w",
    "kind": "sharded",
    "parts": [[0, [0], [4]]],
}
BAD_CHANGES = {
    "unknown_field": {"colour": "red"},
    "unknown_kind": {"kind": "gathered"},
    "no_dtype": {"dtype": ""},
    "dtype_of_wrong_type": {"dtype": 3},
    "no_shape": {"global_shape": None},
    "negative_shape": {"global_shape": [-4]},
    "shape_beyond_int64": {"global_shape": [2**63]},
    "too_many_axes": {"global_shape": [1] * 65, "parts": [[0, [0] * 65, [1] * 65]]},
    "fraction": {"global_shape": [4.5]},
    "part_outside": {"parts": [[0, [1], [4]]]},
    "part_of_other_ndim": {"parts": [[0, [0, 0], [4, 1]]]},
    "part_of_mixed_ndim": {"parts": [[0, [0, 0], [4]]]},
    "part_without_elements": {"parts": [[0, [0], [4]], [1, [4], [0]]]},
    "parts_that_leave_a_gap": {"parts": [[0, [0], [3]]]},
    "negative_rank": {"parts": [[-1, [0], [4]]]},
    "huge_rank": {"parts": [[2**31, [0], [4]]]},
    "holders_of_a_sharded_array": {"ranks": [0]},
    "per_rank_with_parts": {"kind": "per_rank"},
}
PER_RANK = {"dtype": "int8", "key": "w", "kind": "per_rank"}
BAD_HOLDERS = {
    "none": {},
    "both": {"rank_range": [0, 1, 1], "ranks": [0]},
    "empty_range": {"rank_range": [3, 3, 1]},
    "step_zero": {"rank_range": [0, 3, 0]},
    "descending": {"ranks": [3, 1]},
    "with_shape": {"ranks": [1], "global_shape": [4]},
}


def document_of(*lines):
    body = b",\n".join(msgspec.json.encode(line, order="sorted") for line in lines)
    return b'{"arrays":[\n' + body + b'\n],"schema_version":1}\n'


def test_good_example_is_accepted():
    assert len(parse_layout_document(document_of(GOOD), "here")) == 1


@pytest.mark.parametrize("change", BAD_CHANGES.values(), ids=BAD_CHANGES.keys())
def test_parse_refuses_a_bad_array(change):
    with pytest.raises(ManifestError, match=r"layout\.h5"):
        parse_layout_document(document_of(GOOD | change), "layout.h5")


@pytest.mark.parametrize("change", BAD_HOLDERS.values(), ids=BAD_HOLDERS.keys())
def test_parse_refuses_bad_holders(change):
    with pytest.raises(ManifestError):
        parse_layout_document(document_of(PER_RANK | change), "layout.h5")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"arrays":[]}',
        b'{"schema_version":true,"arrays":[]}',
        b'{"schema_version":1}',
        b'{"schema_version":1,"arrays":[]}',
        b"[" * 100_000,
        b'{"arrays":' + b"[" * 100_000,
        document_of(GOOD, GOOD),
        document_of(GOOD).replace(b'"dtype"', b'"dtype":"int4","dtype"'),
        document_of(GOOD).replace(b'"w"', b'"\\ud800"'),
        document_of(GOOD).replace(b'"w"', b'"\xed\xa0\x80"'),
        document_of(GOOD).replace(b"[4]", b"[" + b"9" * 10_000 + b"]"),
        document_of(GOOD).replace(b"[4]", b"[NaN]"),
    ],
)
def test_parse_refuses_a_malformed_document(text):
    with pytest.raises(ManifestError, match=r"layout\.h5"):
        parse_layout_document(text, "layout.h5")


@given(st.data())
def test_parse_of_a_damaged_document_raises_only_manifest_error(data):
    text = bytearray(dump_layout_document(some_entries()))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(text) - 1))
        text[place] = data.draw(st.integers(0, 255))

    try:
        entries = parse_layout_document(bytes(text), "layout.h5")
    except ManifestError:
        return

    assert all(isinstance(entry, LayoutEntry) for entry in entries)

"""The manifest, and what is refused in its place."""

import hashlib
import json
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpickpt.errors import ManifestError
from mpickpt.format.manifest import (
    ArrayRecord,
    LayoutRecord,
    ShardManifest,
    ShardRecord,
    dump_manifest,
    parse_manifest,
)
from mpickpt.format.naming import shard_path

ID = "3f2a91c0" * 4


def shard(rank, world_size, **changes):
    record = ShardRecord(
        rank=rank,
        path=shard_path(rank, world_size, ID),
        nbytes=1 << 20,
        sha256=f"{rank:064x}",
        crc32=f"{rank:08x}",
        param_shard_offset=rank * 100,
        param_shard_numel=100,
        index=(4096, 512, "0a1b2c3d"),
    )
    return msgspec.structs.replace(record, **changes)


def manifest(world_size=3, **changes):
    record = ShardManifest(
        world_size=world_size,
        step=1234,
        wall_clock_seconds=4521.0,
        shards=tuple(shard(rank, world_size) for rank in range(world_size)),
        arrays=(
            ArrayRecord(
                key="model/w", kind="sharded", dtype="bfloat16", global_shape=(30, 10)
            ),
            ArrayRecord(key="rng", kind="per_rank", dtype="U7", global_shape=None),
        ),
        checkpoint_id=ID,
        created_at="2026-01-31T12:00:00Z",
        writer={"mpickpt": "0.1.0"},
        run={},
        metrics={"loss": 0.5},
        metadata={"note": "é\n"},
        layout=LayoutRecord(
            path="layout-9be19be19be19be1.h5",
            nbytes=8192,
            sha256="9be1" * 16,
            payload=(2048, 100, "00000000"),
        ),
    )
    return msgspec.structs.replace(record, **changes)


def signed(document):
    """Return a document as text whose digest is right."""
    fields = {"manifest_sha256": "0" * 64} | document
    blank = json.dumps(fields, indent=1)
    digest = hashlib.sha256(blank.encode()).hexdigest()
    return blank.replace("0" * 64, digest, 1).encode()


def document(**changes):
    fields = json.loads(dump_manifest(manifest()))
    del fields["manifest_sha256"]
    return fields | changes


def with_shard(number, **changes):
    fields = document()
    fields["shards"][number] |= changes
    return fields


def with_array(number, **changes):
    fields = document()
    fields["arrays"][number] |= changes
    return fields


def with_layout(**changes):
    fields = document()
    fields["layout"] |= changes
    return fields


def refused(text):
    with pytest.raises(ManifestError) as caught:
        parse_manifest(text, where="run/step-0000001234/manifest.json")
    assert "run/step-0000001234/manifest.json: " in str(caught.value)
    assert len(str(caught.value)) < 1000
    return str(caught.value)


@pytest.mark.parametrize("world_size", [1, 3, 1001])
def test_manifest_parses_back(world_size):
    written = manifest(world_size)

    read = parse_manifest(dump_manifest(written), where="x")

    assert msgspec.structs.replace(read, manifest_sha256="0" * 64) == written
    assert read.nbytes == world_size << 20
    assert read.id8 == "3f2a91c0"


def test_manifest_dumps_the_bytes_that_were_parsed():
    text = dump_manifest(manifest(layout=None, arrays=()))

    assert dump_manifest(parse_manifest(text, where="x")) == text


def test_manifest_is_sorted_with_one_record_a_line():
    lines = dump_manifest(manifest()).decode().splitlines()

    fields = [line.split('"')[1] for line in lines if line.startswith('  "')]
    assert fields == sorted(fields)
    assert sum(line.startswith('    {"crc32": ') for line in lines) == 3
    assert sum(line.startswith('    {"dtype": ') for line in lines) == 2
    assert lines[-1] == "}"


def test_manifest_digest_is_that_of_the_file_with_its_own_zeroed():
    text = dump_manifest(manifest())

    digest = json.loads(text)["manifest_sha256"]
    blank = text.replace(digest.encode(), b"0" * 64)
    assert hashlib.sha256(blank).hexdigest() == digest


def test_manifest_digest_is_found_beside_a_field_of_that_name():
    decoy = {"manifest_sha256": "0" * 64}

    text = dump_manifest(manifest(metadata=decoy, extra={"a": decoy}))

    assert parse_manifest(text, where="x").metadata == decoy


def test_manifest_finds_every_flipped_bit():
    text = dump_manifest(manifest(world_size=1))

    for at in range(len(text)):
        for bit in range(8):
            flipped = bytearray(text)
            flipped[at] ^= 1 << bit
            with pytest.raises(ManifestError):
                parse_manifest(bytes(flipped), where="x")


def test_manifest_finds_every_truncation():
    text = dump_manifest(manifest(world_size=1))

    for length in range(len(text)):
        refused(text[:length])


def test_manifest_keeps_unknown_fields():
    unknown = {"later": [1, {"x": None}], "extra": "a field of this name"}

    read = parse_manifest(signed(document(**unknown)), where="x")

    assert read.extra == unknown
    assert parse_manifest(dump_manifest(read), where="x").extra == unknown


def test_manifest_ignores_unknown_fields_of_records():
    read = parse_manifest(signed(with_shard(0, later=1)), where="x")

    assert read.shards == manifest().shards


@pytest.mark.parametrize("version", [2, 10**30])
def test_newer_schema_is_refused_before_its_digest(version):
    complaint = refused(json.dumps({"schema_version": version}).encode())

    assert f"newer mpickpt, schema {version}; this one reads 1: upgrade" in complaint


@pytest.mark.parametrize("version", [0, -1, True, 1.0, "1", None, [1]])
def test_other_schema_is_refused(version):
    complaint = refused(signed(document(schema_version=version)))

    assert "schema_version: expected 1, got " in complaint


@pytest.mark.parametrize(
    "text",
    [b"", b"\xff\xfe", b"\xef\xbb\xbf{}", b"nul", b"{}x", b"[1]", b"1", b"null", b"{"]
    + ['{"a": 1}'.encode("utf-16"), b'{"a": 1, "a": 1}', b'{"x": {"a": 1, "a": 2}}']
    + [b'{"a": NaN}', b'{"a": -Infinity}', b'{"a": 1e999}', b'{"a": "\n"}'],
)
def test_text_that_is_not_strict_json_is_refused(text):
    refused(text)


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 10**6,
        b'{"a":' * 10**5,
        b'{"schema_version": 1, "a": ' + b"[" * 10**5 + b"]" * 10**5 + b"}",
        b'{"a": ' + b"9" * 10**6 + b"}",
        b'{"a": 0.' + b"9" * 10**6 + b"}",
        b'{"a": 1e' + b"9" * 10**6 + b"}",
        b"{" + b",".join(b'"%d":0' % n for n in range(10**5)) + b',"7":0}',
        b" " * ((64 << 20) + 1),
    ],
    ids=["arrays", "objects", "closed", "int", "float", "exponent", "twice", "long"],
)
def test_monstrous_text_is_refused_in_short_time(text):
    start = time.perf_counter()

    refused(text)

    assert time.perf_counter() - start < 2


@given(st.binary())
def test_any_bytes_are_refused_with_manifest_error(text):
    refused(text)


TEXT = st.text(st.characters())
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=8,
)


@given(st.data())
def test_any_value_in_any_field_is_accepted_or_refused_with_manifest_error(data):
    fields = document()
    place = data.draw(
        st.sampled_from(
            [fields, fields["shards"][1], fields["arrays"][0], fields["layout"]]
        )
    )
    place[data.draw(st.sampled_from(sorted(place)) | TEXT)] = data.draw(JSON)

    try:
        read = parse_manifest(signed(fields), where="x")
    except ManifestError:
        return

    assert isinstance(read, ShardManifest)


@pytest.mark.parametrize("name", sorted(set(document()) - {"layout"}))
def test_missing_field_is_refused(name):
    fields = document()
    del fields[name]

    assert name in refused(signed(fields))


@pytest.mark.parametrize(
    "fields", [with_array(0, kind="\ud800"), with_shard(0, **{"\ud800": 1})]
)
def test_lone_surrogate_in_a_name_is_refused(fields):
    assert "surrogates not allowed" in refused(signed(fields))


def test_missing_digest_is_refused():
    complaint = refused(json.dumps(document()).encode())

    assert "manifest_sha256: expected 64 lower-case hex" in complaint


def test_digest_written_twice_is_refused():
    text = dump_manifest(manifest())
    line = next(line for line in text.splitlines() if b"manifest_sha256" in line)
    twice = text.replace(b'"run": {}', b'"run": {' + line.strip(b" ,") + b"}")

    assert "once in the file, got '2 times'" in refused(twice)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        (document(step=-1), "`$.step`, got -1"),
        (document(step=2**63), f"`$.step`, got {2**63}"),
        (document(step=1.0), "`$.step`"),
        (document(step=True), "got `bool` - at `$.step`"),
        (document(wall_clock_seconds=-0.5), "wall_clock_seconds"),
        (document(wall_clock_seconds=10**400), "wall_clock_seconds"),
        (document(checkpoint_id=ID.upper()), "checkpoint_id"),
        (document(created_at="2026-01-31 12:00:00"), "created_at"),
        (document(created_at="2026-01-31T12:00:00Z\n"), "created_at"),
        (document(writer={"mpickpt": 1}), "writer"),
        (document(metrics=[]), "metrics"),
        (document(world_size=0), "world_size"),
        (document(world_size=4), "shards: expected 4 records, got 3"),
        (document(world_size=2), "shards: expected 2 records, got 3"),
        (document(shards=[]), "shards: expected 3 records, got 0"),
    ],
)
def test_field_that_breaks_a_rule_is_refused(fields, complaint):
    assert complaint in refused(signed(fields))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"rank": 2}, "shards[1].rank: expected 1, got 2"),
        ({"nbytes": 0}, "shards[1].nbytes"),
        ({"nbytes": "1"}, "shards[1].nbytes"),
        ({"sha256": "A" * 64}, "shards[1].sha256"),
        ({"sha256": "a" * 63}, "shards[1].sha256"),
        ({"sha256": "a" * 64 + "\n"}, "shards[1].sha256"),
        ({"crc32": "0000000g"}, "shards[1].crc32"),
        ({"param_shard_offset": 99}, "param_shard_offset: expected 100, got 99"),
        ({"param_shard_offset": 101}, "param_shard_offset: expected 100, got 101"),
        ({"param_shard_numel": 99}, "shards[2].param_shard_offset: expected 199"),
        ({"param_shard_numel": 2**63 - 1}, "shards[2].param_shard_offset"),
        ({"index": [4096, 512]}, "shards[1].index"),
        ({"index": [0, 0, "00000000"]}, "shards[1].index"),
        ({"index": [1 << 20, 1, "00000000"]}, "index: expected a range inside"),
        ({"index": [2**63 - 1, 2**63 - 1, "00000000"]}, "shards[1].index"),
    ],
)
def test_shard_that_breaks_a_rule_is_refused(changes, complaint):
    assert complaint in refused(signed(with_shard(1, **changes)))


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "../rank00001-3f2a91c0.h5", "rank00000-3f2a91c0.h5", "", "\ud800"]
    + ["./rank00001-3f2a91c0.h5", "ranks00000/rank00001-3f2a91c0.h5", "rank00001.h5"]
    + ["rank00001-3f2a91c0.h5.tmp", "rank00001-3f2a91c0.h5\0", "x" * 10**5],
    ids=lambda path: ascii(path)[:30],
)
def test_shard_path_that_is_not_the_ranks_own_is_refused(path):
    complaint = refused(signed(with_shard(1, path=path)))

    assert "shards[1].path: expected a name like rank00001-" in complaint


def test_last_range_that_overflows_is_refused():
    fields = with_shard(2, param_shard_numel=2**63 - 1)

    assert "elements" in refused(signed(fields))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"key": "rng"}, "arrays[1].key: expected each key once, got 'rng'"),
        ({"key": "a//b"}, "arrays[0].key: expected a canonical key, got 'a//b'"),
        ({"key": "../x"}, "arrays[0].key"),
        ({"key": "%mpickpt/index"}, "arrays[0].key"),
        ({"kind": "other"}, "arrays[0].kind"),
        ({"dtype": "object"}, "arrays[0].dtype: expected a known dtype"),
        ({"dtype": None}, "arrays[0].dtype"),
        ({"global_shape": None}, "global_shape: expected a shape, got None"),
        ({"kind": "per_rank"}, "global_shape: expected null, got (30, 10)"),
        ({"global_shape": [-1]}, "`$.arrays[0].global_shape[0]`, got -1"),
        ({"global_shape": [2**32, 2**31]}, "global_shape: expected at most"),
        ({"global_shape": [0, 2**32, 2**32]}, "global_shape: expected at most"),
        ({"global_shape": [1] * 65}, "global_shape"),
    ],
)
def test_array_that_breaks_a_rule_is_refused(changes, complaint):
    assert complaint in refused(signed(with_array(0, **changes)))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"path": "../layout-9be19be19be19be1.h5"}, "layout.path"),
        ({"path": "layout.h5"}, "layout.path: expected a name like layout-<16 hex>"),
        ({"sha256": "9be1"}, "layout.sha256"),
        ({"payload": [8000, 193, "00000000"]}, "layout.payload: expected a range"),
    ],
)
def test_layout_that_breaks_a_rule_is_refused(changes, complaint):
    assert complaint in refused(signed(with_layout(**changes)))


@pytest.mark.parametrize(
    "changes",
    [
        {"metadata": {"a": float("nan")}},
        {"metadata": {"a": {1, 2}}},
        {"metadata": {"a": 1, 2: 3}},
        {"shards": (shard(0, 3),)},
        {"step": -1},
        {"extra": {"step": 1}},
    ],
)
def test_dump_refuses_what_could_not_be_read(changes):
    with pytest.raises(ManifestError, match="manifest of step"):
        dump_manifest(manifest(**changes))


def test_metadata_may_hold_any_text():
    metadata = {"\ud800": "\udfff \\ud800 \x00 \u2028"}

    read = parse_manifest(dump_manifest(manifest(metadata=metadata)), where="x")

    assert read.metadata == metadata


def test_largest_world_stays_small_and_fast():
    start = time.perf_counter()

    text = dump_manifest(manifest(world_size=65536))

    assert len(text) < 20e6
    assert time.perf_counter() - start < 10

"""Checkpoints that an enemy wrote, with right digests: refused by our errors only.

Whatever the files say, a reader ends soon, in bounded memory, and opens nothing
outside the checkpoint's directory. tests/faults/hostile.py fuzzes; here are forgeries
with the reader that must refuse each.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import mpickpt
from mpickpt import (
    CheckpointError,
    IncompleteCheckpointError,
    LayoutError,
    ManifestError,
    PerRank,
    Replicated,
    Sharded,
    StorageError,
    load_sharded,
    open_checkpoint,
    read_manifest,
    save_sharded,
)
from mpickpt.storage.verification import verify_checkpoint
from tests.ranks_as_threads import run_ranks
from tests.unit.forging import forge_index, forge_layout, forge_manifest, signed

SECONDS = 20.0
REPOSITORY = Path(mpickpt.__file__).parents[1]
SECRET = "what no reader may open"


def state_of(rank):
    return {
        "w": Sharded.block(np.arange(12, dtype=np.float32) + 12 * rank),
        "box": Sharded(
            np.full((3, 2), rank, np.int16), global_shape=(3, 4), offset=(0, 2 * rank)
        ),
        "same": Replicated(np.arange(5.0)),
        "own": PerRank(np.arange(rank + 2)),
        "plain": {"lr": 0.5, "big": 2**80, "bytes": b"x", "tuple": (1, None)},
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of two ranks."""
    path = tmp_path_factory.mktemp("saved") / "checkpoint"

    def save_rank(comm):
        return save_sharded(state_of(comm.rank), path, step=1, comm=comm)

    for outcome in run_ranks(2, save_rank):
        assert not isinstance(outcome, BaseException), outcome
    return path


@pytest.fixture
def checkpoint(saved, tmp_path):
    """A copy that a test may forge, beside a file that nobody may open."""
    (tmp_path / "secret").write_text(SECRET)
    return Path(shutil.copytree(saved, tmp_path / "checkpoint"))


_opened: list[str] | None = None


def _note_opened(event, arguments):
    if (
        _opened is not None
        and event == "open"
        and isinstance(arguments[0], str | bytes)
    ):
        _opened.append(os.fsdecode(arguments[0]))


sys.addaudithook(_note_opened)

_HARMLESS = (
    *("/proc/", "/sys/", str(REPOSITORY / "mpickpt")),
    *{os.path.realpath(path) for path in sysconfig.get_paths().values()},
    *sysconfig.get_paths().values(),
)


def load_on(path, size, **options):
    outcomes = run_ranks(
        size, lambda comm: load_sharded(path, comm=comm, **options), SECONDS
    )
    errors = [o for o in outcomes if isinstance(o, BaseException)]
    if errors:
        assert len(errors) == size, f"only some ranks refused: {outcomes}"
        assert len({(type(e), str(e)) for e in errors}) == 1, errors
        raise errors[0]
    return outcomes


def load_alone(path, **options):
    return load_sharded(path, reshard=True, **options)


def load_opened(path):
    with open_checkpoint(path) as opened:
        opened.keys()
        return opened.load()


def slice_opened(path):
    with open_checkpoint(path) as opened:
        arrays = [opened[record.key] for record in opened.manifest.arrays]
        return [array[:1] if array.shape else array[...] for array in arrays]


def verify(path):
    report = verify_checkpoint(path)
    if report.failures:
        raise report.failures[0].error


READERS = {
    "2 ranks": lambda path: load_on(path, 2),
    "2 ranks, crc32": lambda path: load_on(path, 2, verify="crc32"),
    "2 ranks, none": lambda path: load_on(path, 2, verify="none"),
    "1 rank": lambda path: load_alone(path, like=wanted),
    "3 ranks": lambda path: load_on(path, 3, reshard=True, only=["w", "box", "same"]),
    "open": load_opened,
    "slices": slice_opened,
    "verify": verify,
    "read_manifest": read_manifest,
}


def wanted(manifest):
    """Ask for what one rank can have of the state of two."""
    keep = PerRank(None, on_resize="keep")
    return {name: mpickpt.AsSaved for name in ("w", "box", "same", "plain")} | {
        "own": keep
    }


def read(path, reader):
    """Return the CheckpointError of a reader, or None; anything else is a failure."""
    global _opened
    _opened = opened = []
    begin = time.monotonic()
    try:
        READERS[reader](path)
    except CheckpointError as error:
        assert len(str(error)) < 30_000
        return error
    except KeyError:
        assert reader in ("open", "slices")  # what it asks for is not there
        return None
    finally:
        _opened = None
        assert time.monotonic() - begin < SECONDS
        inside = (str(path), os.path.realpath(path))
        outside = [p for p in opened if not p.startswith((*inside, *_HARMLESS))]
        assert not outside, "opened outside of the checkpoint"
    return None


def require_refused(path, *, by=tuple(READERS), expected=CheckpointError):
    """Assert that the readers refuse; the others must fail with our errors at most."""
    refusals = {reader: read(path, reader) for reader in READERS}
    for reader in by:
        assert isinstance(refusals[reader], expected), (reader, refusals[reader])
    return refusals


BY_LOADS = ("2 ranks", "2 ranks, crc32", "2 ranks, none", "1 rank", "open")


def test_forging_alone_spoils_nothing(checkpoint):
    forge_index(checkpoint, 0, lambda index: None)
    forge_index(checkpoint, 1, lambda index: None)
    forge_manifest(checkpoint, lambda manifest: None)

    assert {reader: read(checkpoint, reader) for reader in READERS} == dict.fromkeys(
        READERS
    )


def shard_field(name, value, rank=1):
    def change(manifest):
        manifest["shards"][rank][name] = value

    return change


def field(name, value):
    def change(manifest):
        manifest[name] = value

    return change


def array_field(name, value, number=0):
    def change(manifest):
        manifest["arrays"][number][name] = value

    return change


def layout_field(name, value):
    def change(manifest):
        manifest["layout"][name] = value

    return change


FORGED_MANIFESTS = {
    "absolute shard path": shard_field("path", "/etc/passwd"),
    "shard path above": shard_field("path", "../secret"),
    "shard path through ..": shard_field("path", "x/../../secret"),
    "shard path with NUL": shard_field("path", "rank00001-00000000.h5\0"),
    "empty shard path": shard_field("path", ""),
    "shard path is the manifest": shard_field("path", "manifest.json"),
    "shard path of another rank": lambda m: m["shards"][1].update(
        path=m["shards"][0]["path"]
    ),
    "shard path in a sub-directory": lambda m: m["shards"][1].update(
        path="ranks00000/" + m["shards"][1]["path"]
    ),
    "shard path is a number": shard_field("path", 7),
    "absolute layout path": layout_field("path", "/etc/passwd"),
    "layout path above": layout_field("path", "../secret"),
    "shard without bytes": shard_field("nbytes", 0),
    "shard of negative length": shard_field("nbytes", -1),
    "shard longer than int64": shard_field("nbytes", 2**63),
    "shard of 2^200 bytes": shard_field("nbytes", 2**200),
    "shard of half a byte": shard_field("nbytes", 0.5),
    "shard length true": shard_field("nbytes", True),
    "index outside the shard": shard_field("index", [2**62, 2**62, "00000000"]),
    "index of negative offset": shard_field("index", [-4, 8, "00000000"]),
    "index without bytes": shard_field("index", [0, 0, "00000000"]),
    "digest too short": shard_field("sha256", "00"),
    "digest in capitals": shard_field("sha256", "A" * 64),
    "parameter ranges overlap": shard_field("param_shard_offset", 0),
    "parameter ranges leave a gap": shard_field("param_shard_offset", 2**40),
    "parameter range of 2^63": shard_field("param_shard_numel", 2**63 - 1),
    "no shards": field("shards", []),
    "ranks in another order": lambda m: m["shards"].reverse(),
    "a million ranks": field("world_size", 10**6),
    "no ranks": field("world_size", 0),
    "2^63 ranks": field("world_size", 2**63),
    "negative step": field("step", -1),
    "step of 2^64": field("step", 2**64),
    "arrays is an object": field("arrays", {}),
    "array twice": lambda m: m["arrays"].append(m["arrays"][0]),
    "array key above": array_field("key", "../../secret"),
    "array of unknown dtype": array_field("dtype", "object"),
    "array of code as dtype": array_field("dtype", "__import__('os')"),
    "array of negative shape": array_field("global_shape", [-1]),
    "array of 2^64 elements": array_field("global_shape", [2**32, 2**32]),
    "array of 65 axes": array_field("global_shape", [1] * 65),
    "schema of the future": field("schema_version", 2),
    "id of another form": field("checkpoint_id", "../" * 10 + "aa"),
    "created by code": field("created_at", "$(rm -rf /)"),
    "document is a list": lambda m: [m],
    "document is a number": lambda m: 7,
}


@pytest.mark.parametrize("forgery", FORGED_MANIFESTS)
def test_forged_manifest_is_refused(checkpoint, forgery):
    if forgery.startswith("document"):
        text = json.dumps(FORGED_MANIFESTS[forgery]({}))
        (checkpoint / "manifest.json").write_text(text)
    else:
        forge_manifest(checkpoint, FORGED_MANIFESTS[forgery])

    require_refused(checkpoint, expected=ManifestError)


TEXTS = {
    "nested 100,000 deep": '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "objects 100,000 deep": '{"a": ' * 100_000 + "1" + "}" * 100_000,
    "opened 1,000,000 times": "[" * 1_000_000,
    "a number of 1,000,000 digits": '{"step": ' + "9" * 1_000_000 + "}",
    "NaN": '{"step": NaN}',
    "Infinity": '{"step": -Infinity}',
    "1e999": '{"step": 1e999}',
    "no UTF-8": b'{"step": "\xff\xfe"}',
    "UTF-16": '{"step": 1}'.encode("utf-16"),
    "byte order mark": b"\xef\xbb\xbf{}",
    "nothing": "",
    "zeros": b"\0" * 4096,
    "a string": '"manifest"',
}


@pytest.mark.parametrize("name", TEXTS)
def test_other_text_than_a_manifest_is_refused(checkpoint, name):
    text = TEXTS[name]
    text = text.encode() if isinstance(text, str) else text
    (checkpoint / "manifest.json").write_bytes(text)

    require_refused(checkpoint, expected=ManifestError)


@pytest.mark.parametrize("place", ["shards", "metadata", "shard record"])
def test_duplicate_key_is_refused(checkpoint, place):
    path = checkpoint / "manifest.json"
    document = json.loads(path.read_text()) | {"manifest_sha256": "0" * 64}
    first, double = {
        "shards": ('"shards": ', '"shards": [], "shards": '),
        "metadata": ('"metadata": {', '"metadata": {"a": 1, "a": 2'),
        "shard record": ('"rank": 0', '"rank": 1, "rank": 0'),
    }[place]
    text = json.dumps(document)
    assert text.count(first) == 1
    path.write_bytes(signed(text.replace(first, double)))

    refusals = require_refused(checkpoint, expected=ManifestError)

    assert "times in one object" in str(refusals["read_manifest"])


METADATA = {
    "integers of any size": {"n": [2**63, 2**64, -(2**70), 2**300]},
    "lone surrogate": {"text": "\ud800", "\udfff": 1},
    "nested 150 deep": json.loads("[" * 150 + "]" * 150),
    "a key named like ours": {"manifest_sha256": "0" * 64, "$array": 0},
    "NUL and controls": {"\0": "\x01\x7f"},
}


@pytest.mark.parametrize("name", METADATA)
def test_any_metadata_of_a_user_loads_everywhere(checkpoint, name):
    forge_manifest(checkpoint, field("metadata", {"user": METADATA[name]}))

    assert {reader: read(checkpoint, reader) for reader in READERS} == dict.fromkeys(
        READERS
    )


def test_unknown_fields_are_kept_and_ignored(checkpoint):
    forge_manifest(checkpoint, field("of_the_future", {"n": 2**70}))

    assert read_manifest(checkpoint).extra == {"of_the_future": {"n": 2**70}}
    assert read(checkpoint, "2 ranks") is None


def entry(index, key):
    return next(array for array in index["arrays"] if array["key"] == key)


def part(key, **changes):
    """Change place, offset or shape of the first part of an array."""

    def change(index):
        place, offset, shape = entry(index, key)["parts"][0]
        new = {"place": place, "offset": offset, "shape": shape} | changes
        entry(index, key)["parts"][0] = [new["place"], new["offset"], new["shape"]]

    return change


def of_array(key, /, **changes):
    return lambda index: entry(index, key).update(changes)


def parts_of(key, make):
    def change(index):
        parts = entry(index, key)["parts"]
        entry(index, key)["parts"] = make(parts)

    return change


def tree(make):
    def change(index):
        index["tree"] = make(index["tree"])

    return change


def halves_twice(parts):
    """Name the first half two times, so that the sum of elements is right."""
    place, offset, shape = parts[0]
    return [[place, offset, [shape[0] // 2]]] * 2


def index_field(name, value):
    return lambda index: index.update({name: value})


# Of rank 1; every one would give wrong elements, or none.
LYING_INDEXES = {
    "part behind the end of the file": part("w", place=2**40),
    "part that leaves the file": part("w", place=10**4),
    "part of negative offset": part("w", place=-8),
    "part without a place": part("w", place=None),
    "part at 2^63": part("w", place=2**63),
    "part at 2^100": part("w", place=2**100),
    "part at half a byte": part("w", place=0.5),
    "part of negative size": part("w", shape=[-12]),
    "part before its array": part("w", offset=[-1]),
    "part behind its array": part("w", offset=[24]),
    "part of another number of axes": part("w", offset=[12, 0], shape=[12, 1]),
    "part of other elements": part("w", offset=[0]),
    "part of 2^62 elements": part("w", shape=[2**62]),
    "part named twice": parts_of("w", lambda parts: parts * 2),
    "half of a part named twice": parts_of("w", halves_twice),
    "half of a per-rank part named twice": parts_of(
        "own", lambda parts: [[parts[0][0], [0], [1]]] * 3
    ),
    "part left out": parts_of("w", lambda parts: []),
    "per-rank part left out": parts_of("own", lambda parts: []),
    "array of other dtype of the same size": of_array("w", dtype="int32"),
    "array of smaller dtype": of_array("w", dtype="float16"),
    "array of larger dtype": of_array("w", dtype="complex128"),
    "array of other byte order": of_array("w", dtype=">f4"),
    "array of dtype object": of_array("w", dtype="object"),
    "array of unknown dtype": of_array("w", dtype="float23"),
    "array of a structured dtype": of_array("w", dtype="f4,f4"),
    "array of enormous strings": of_array("w", dtype="U99999999999999999999"),
    "array of unknown kind": of_array("w", kind="stolen"),
    "array of kind per_rank": of_array("w", kind="per_rank"),
    "array of kind replicated": of_array("w", kind="replicated"),
    "per-rank array of kind sharded": of_array("own", kind="sharded"),
    "array of larger shape": of_array("w", shape=[2**40]),
    "array of 2^200 rows": of_array("w", shape=[2**200]),
    "array of negative shape": of_array("w", shape=[-24]),
    "array of another number of axes": of_array("w", shape=[24, 1]),
    "per-rank array of 2^60 elements": lambda index: entry(index, "own").update(
        shape=[2**60], parts=[]
    ),
    "key that leads above": of_array("w", key="../../secret"),
    "key that is not listed": of_array("w", key="v"),
    "key that is not canonical": of_array("w", key="w/"),
    "key of another array": of_array("w", key="same"),
    "one array twice": lambda index: index["arrays"].append(entry(index, "w")),
    "box outside": of_array("w", boxes=[[[20], [12]]]),
    "box of 2^62 elements": of_array("w", boxes=[[[0], [2**62]]]),
    "table of negative offset": index_field("table", [-4, 4]),
    "table outside the file": index_field("table", [2**40, 4]),
    "table in front": index_field("table", [0, 4]),
    "table without bytes": index_field("table", [64, 0]),
    "table of odd length": index_field("table", [64, 3]),
    "rank of another": index_field("rank", 0),
    "world of another size": index_field("world_size", 3),
    "schema of the future": index_field("schema_version", 2),
    "arrays is an object": index_field("arrays", {}),
    "ordinal of no array": tree(lambda t: t | {"w": {"$array": 99}}),
    "negative ordinal": tree(lambda t: t | {"w": {"$array": -1}}),
    "ordinal true": tree(lambda t: t | {"w": {"$array": True}}),
    "ordinal of another array": tree(lambda t: t | {"w": t["box"]}),
    "unknown form": tree(lambda t: t | {"x": {"$exec": "import os"}}),
    "form beside other keys": tree(lambda t: t | {"x": {"$int": "1", "y": 1}}),
    "bytes that are no base64": tree(lambda t: t | {"x": {"$bytes": "!"}}),
    "float of three digits": tree(lambda t: t | {"x": {"$float": "abc"}}),
    "int that is none": tree(lambda t: t | {"x": {"$int": "0x"}}),
    "numpy scalar of object": tree(lambda t: t | {"x": {"$numpy": ["object", ""]}}),
    "numpy scalar of no dtype": tree(lambda t: t | {"x": {"$numpy": [7, 7]}}),
    "wrapper without a child": tree(lambda t: t | {"x": {"$per_rank": []}}),
    "wrapper of unknown option": tree(lambda t: t | {"x": {"$per_rank": ["evil", 1]}}),
    "dict with one key twice": tree(
        lambda t: t | {"x": {"$dict": [["a", 1], ["a", 2]]}}
    ),
    "dict with a list as key": tree(lambda t: t | {"x": {"$dict": [[[], 1]]}}),
    "saved leaf in a shard": tree(
        lambda t: t | {"x": {"$leaf": ["w", "sharded", "float32", [24], False]}}
    ),
    "value that varies in a shard": tree(lambda t: t | {"x": {"$varies": None}}),
    "nested 300 deep": tree(lambda t: t | {"x": json.loads("[" * 300 + "]" * 300)}),
    "tree is missing": lambda index: index.pop("tree") and index,
}


# One rank alone keeps its own "own", and SHA-256 needs no table.
WITHOUT_KEPT = ("2 ranks", "2 ranks, crc32", "2 ranks, none", "open")
WITH_TABLE = ("2 ranks, crc32", "open", "verify")
BY_SOME = {
    "half of a per-rank part named twice": WITHOUT_KEPT,
    "per-rank part left out": WITHOUT_KEPT,
    "per-rank array of 2^60 elements": WITHOUT_KEPT,
    "table in front": WITH_TABLE,
    "table without bytes": WITH_TABLE,
    "table of odd length": WITH_TABLE,
}


@pytest.mark.parametrize("lie", LYING_INDEXES)
def test_lying_index_is_refused(checkpoint, lie):
    forge_index(checkpoint, 1, LYING_INDEXES[lie])

    require_refused(checkpoint, by=BY_SOME.get(lie, BY_LOADS))


RAW_INDEXES = {
    "nested 100,000 deep": b"[" * 100_000 + b"]" * 100_000,
    "objects 100,000 deep": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "tree nested 5,000 deep": b'{"tree":' + b"[" * 5_000 + b"]" * 5_000 + b"}",
    "NaN": b'{"schema_version": NaN}',
    "no UTF-8": b'{"schema_version": "\xff"}',
    "a list": b"[1]",
    "nothing": b" ",
    "zeros": b"\0" * 100,
}


@pytest.mark.parametrize("name", RAW_INDEXES)
def test_other_text_than_an_index_is_refused(checkpoint, name):
    forge_index(checkpoint, 1, lambda index: RAW_INDEXES[name], raw=True)

    require_refused(checkpoint, by=BY_LOADS, expected=ManifestError)


@pytest.mark.parametrize("ranks", [(1, 0), (-1, 0), (0, 99), (0, 0)], ids=str)
def test_lying_layout_gives_no_wrong_elements(checkpoint, ranks):
    def rename_ranks(document):
        for stored, rank in zip(entry(document, "w")["parts"], ranks, strict=True):
            stored[0] = rank

    forge_layout(checkpoint, rename_ranks)
    rows = None

    with open_checkpoint(checkpoint) as opened:
        try:
            rows = opened["w"][10:14].tolist()
        except CheckpointError:
            assert isinstance(read(checkpoint, "slices"), CheckpointError)

    assert rows in (None, [10, 11, 12, 13])


def test_shard_that_is_a_symlink_is_not_followed(checkpoint, tmp_path):
    path = checkpoint / read_manifest(checkpoint).shards[1].path
    path.rename(tmp_path / "outside.h5")
    path.symlink_to(tmp_path / "outside.h5")

    refusals = require_refused(checkpoint, by=BY_LOADS, expected=StorageError)

    assert refusals["2 ranks"].path == str(path)


def test_symlink_within_the_checkpoint_is_not_followed_either(checkpoint):
    path = checkpoint / read_manifest(checkpoint).shards[1].path
    path.rename(checkpoint / "moved.h5")
    path.symlink_to("moved.h5")

    require_refused(checkpoint, by=BY_LOADS, expected=StorageError)


@pytest.mark.parametrize("name", ["manifest.json", "layout"])
def test_other_file_that_is_a_symlink_is_not_followed(checkpoint, tmp_path, name):
    if name == "layout":
        name = read_manifest(checkpoint).layout.path
    (checkpoint / name).rename(tmp_path / "outside")
    (checkpoint / name).symlink_to(tmp_path / "outside")

    require_refused(checkpoint, by=["2 ranks", "verify"], expected=StorageError)


@pytest.mark.parametrize("name", ["manifest.json", "shard", "layout"])
@pytest.mark.parametrize("kind", ["FIFO", "directory", "device"])
def test_what_is_no_file_is_refused_at_once(checkpoint, name, kind):
    manifest = read_manifest(checkpoint)
    names = {"shard": manifest.shards[1].path, "layout": manifest.layout.path}
    path = checkpoint / names.get(name, name)
    path.unlink()
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif os.geteuid() == 0:
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero never ends
    else:
        pytest.skip("making a device needs root")

    require_refused(checkpoint, by=["2 ranks", "verify"])


@pytest.fixture(scope="module")
def many_shards(tmp_path_factory):
    """A checkpoint of 1,001 ranks, so that shards lie in sub-directories."""
    path = tmp_path_factory.mktemp("many") / "checkpoint"
    save_sharded({"n": 1}, path, step=1)
    first = read_manifest(path).shards[0].path
    size, id8 = 1001, first[-11:-3]
    content = (path / first).read_bytes()
    record = json.loads((path / "manifest.json").read_text())["shards"][0]
    records = []
    for rank in range(size):
        name = f"ranks{rank // 1000:05d}/rank{rank:05d}-{id8}.h5"
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(content)
        records.append(record | {"rank": rank, "path": name})
    (path / first).unlink()

    def change(manifest):
        manifest |= {"world_size": size, "shards": records, "layout": None}

    forge_manifest(path, change)
    for rank in (0, 1000):
        forge_index(path, rank, lambda i, r=rank: i.update(rank=r, world_size=size))
    return path


@pytest.mark.parametrize("target", ["outside", "inside"])
def test_directory_of_shards_that_is_a_symlink_is_refused(
    many_shards, tmp_path, target
):
    path = Path(shutil.copytree(many_shards, tmp_path / "checkpoint"))
    to = tmp_path / "outside" if target == "outside" else path / "elsewhere"
    (path / "ranks00001").rename(to)
    (path / "ranks00001").symlink_to(to)

    for verdict in (read(path, "verify"), read(path, "open")):
        assert isinstance(verdict, CheckpointError)
    report = verify_checkpoint(path)
    [last] = [file for file in report.files if file.path.startswith("ranks00001")]
    assert isinstance(last.error, StorageError)


def test_manifest_of_100_000_arrays_is_read_soon(checkpoint):
    def change(manifest):
        example = {"kind": "sharded", "dtype": "float32", "global_shape": [0, 2**20]}
        more = [example | {"key": f"more/{n}"} for n in range(100_000)]
        manifest["arrays"] += more

    forge_manifest(checkpoint, change)
    begin = time.monotonic()

    assert len(read_manifest(checkpoint).arrays) > 100_000
    with open_checkpoint(checkpoint) as opened:
        assert opened["w"][:].tolist() == list(range(24))

    assert time.monotonic() - begin < SECONDS
    for reader in ("2 ranks", "verify", "read_manifest"):
        assert read(checkpoint, reader) is None


def test_huge_manifest_is_refused_unread(checkpoint):
    with (checkpoint / "manifest.json").open("r+b") as file:
        file.truncate(1 << 40)  # it has holes, and costs nothing

    require_refused(checkpoint, expected=ManifestError)


def test_index_said_to_be_huge_is_refused_unread(checkpoint):
    path = checkpoint / read_manifest(checkpoint).shards[1].path
    os.truncate(path, 1 << 42)

    def change(manifest):
        manifest["shards"][1] |= {
            "nbytes": 1 << 42,
            "index": [0, 1 << 41, "00000000"],
        }

    forge_manifest(checkpoint, change)

    require_refused(checkpoint, by=BY_LOADS, expected=ManifestError)


BOUNDED = """
import json, resource, sys
from pathlib import Path
import mpickpt
from tests.unit.test_hostile_files import READERS, read
before = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit = before + (600 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
said = {}
for path in map(Path, sys.argv[1:]):
    for reader in ("1 rank", "open", "slices", "verify"):
        error = read(path, reader)
        said[f"{path.name}: {reader}"] = type(error).__name__
print(json.dumps(said))
"""
ENORMOUS = {
    "index of larger shape": (forge_index, of_array("w", shape=[2**34])),
    "manifest of larger shape": (None, None),
    "both of larger shape": (forge_index, of_array("w", shape=[2**34])),
    "per-rank array of 2^34 rows": (
        forge_index,
        lambda index: entry(index, "own").update(shape=[2**34], parts=[]),
    ),
    "scalar of 2^34 bytes": (
        forge_index,
        tree(lambda t: t | {"x": {"$numpy": ["S17179869184", ""]}}),
    ),
    "array of 2^34 empty rows": (forge_index, of_array("w", shape=[2**34, 0])),
}


def test_enormous_claims_take_no_memory(saved, tmp_path):
    for name, (forge, change) in ENORMOUS.items():
        path = Path(shutil.copytree(saved, tmp_path / name))
        if forge is not None:
            forge(path, 1, change)
        if name.startswith(("manifest", "both")):
            keys = [record.key for record in read_manifest(path).arrays]
            forge_manifest(path, array_field("global_shape", [2**34], keys.index("w")))

    finished = subprocess.run(
        [sys.executable, "-c", BOUNDED, *(str(tmp_path / name) for name in ENORMOUS)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        check=False,
    )

    assert finished.returncode == 0, finished.stderr[-3000:]
    said = json.loads(finished.stdout)
    opened = {case: error for case, error in said.items() if ": open" in case}
    assert "NoneType" not in opened.values(), said


def test_threads_of_a_refused_load_end(checkpoint):
    forge_index(checkpoint, 1, part("w", offset=[0]))
    before = threading.active_count()

    for _ in range(5):
        require_refused(checkpoint, by=["1 rank"])

    assert threading.active_count() <= before


def test_errors_say_what_is_wrong(checkpoint):
    forge_index(checkpoint, 1, parts_of("w", lambda parts: []))

    refusals = require_refused(checkpoint, by=BY_LOADS)

    for reader in ("2 ranks", "1 rank", "open"):
        assert "'w'" in str(refusals[reader])
        assert isinstance(refusals[reader], IncompleteCheckpointError | LayoutError)

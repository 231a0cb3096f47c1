"""What no importer may do: execute a source, leave it, or import what is damaged."""

import os
import pickle  # noqa: TID251  to forge what an import must refuse
import re
import shutil
import time
import tracemalloc
import warnings
import zipfile

import pytest

from mpickpt import CorruptShardError, SaveResult, importers
from tests.interop.hostile import (
    BOMBS,
    PAYLOADS,
    files_left,
    files_of,
    flip,
    link_away,
    payload,
    places_in,
    refusal_of,
    require_refused,
    rewrite_item,
    rewrite_metadata,
    rewrite_pickle,
    tree_of,
    with_call,
)
from tests.ranks_as_threads import run_ranks

pytest.importorskip("torch")
from tests.interop.foreign_samples import SAMPLES, make_dcp


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    made = {}
    for name, (_, make) in SAMPLES.items():
        made[name] = tmp_path_factory.mktemp("hostile") / "source"
        make(made[name])
    return made


@pytest.fixture
def copy_of(originals, tmp_path):
    """Gives a fresh copy of a sample."""

    def copy(name):
        return shutil.copytree(originals[name], tmp_path / "source")

    return copy


@pytest.mark.parametrize("name", SAMPLES)
def test_flipped_bit_is_an_error_or_changes_nothing(name, copy_of, tmp_path):
    source, target, kind = copy_of(name), tmp_path / "out", SAMPLES[name][0]
    getattr(importers, kind)(source, target)
    expected = tree_of(target)
    shutil.rmtree(target)
    silent, refused = [], 0

    for file in files_of(source):
        path = source / file
        for position in places_in(path.stat().st_size, seed=str(file), count=16):
            bit = position % 8
            flip(path, position, bit)
            error = refusal_of(kind, source, target)
            flip(path, position, bit)
            refused += error is not None
            if error is None:
                # DCP's metadata has no checksum: a name that is told once may change.
                leaves = leaves_of if file.name == ".metadata" else lambda tree: tree
                if leaves(tree_of(target)) != leaves(expected):
                    silent.append((str(file), position, bit))
                shutil.rmtree(target)

    print(refused, "refused")
    assert not silent


def leaves_of(tree):
    """Return what a tree holds, without the names."""
    if isinstance(tree, dict | list):
        items = tree.values() if isinstance(tree, dict) else tree
        return sorted((leaf for item in items for leaf in leaves_of(item)), key=repr)
    return [tree]


@pytest.mark.parametrize("name", SAMPLES)
def test_cut_file_is_an_error(name, copy_of, tmp_path):
    source, target, kind = copy_of(name), tmp_path / "out", SAMPLES[name][0]

    for file in files_of(source):
        path = source / file
        content = path.read_bytes()
        for nbytes in places_in(len(content), seed=str(file), count=6):
            path.write_bytes(content[:nbytes])
            error = refusal_of(kind, source, target)
            assert error is not None, (file, nbytes, len(content))
        path.write_bytes(content)


@pytest.mark.parametrize("name", SAMPLES)
def test_missing_file_is_an_error(name, copy_of, tmp_path):
    source, target, kind = copy_of(name), tmp_path / "out", SAMPLES[name][0]

    for file in files_of(source):
        if file.name in ("integrity.json", "optimizer_state.pt"):
            continue  # not every checkpoint has it
        content = (source / file).read_bytes()
        (source / file).unlink()
        require_refused(kind, source, target)
        (source / file).write_bytes(content)


@pytest.mark.parametrize("name", SAMPLES)
def test_file_behind_a_symlink_is_refused(name, copy_of, tmp_path):
    source, target, kind = copy_of(name), tmp_path / "out", SAMPLES[name][0]

    for file in files_of(source):
        outside = tmp_path / "outside"
        link_away(source / file, outside)
        require_refused(kind, source, target, "symlink", str(source / file))
        (source / file).unlink()
        shutil.move(outside, source / file)


@pytest.mark.parametrize("name", SAMPLES)
def test_directory_behind_a_symlink_is_refused(name, copy_of, tmp_path):
    source, target, kind = copy_of(name), tmp_path / "out", SAMPLES[name][0]

    for directory in sorted(path for path in source.rglob("*") if path.is_dir()):
        link_away(directory, tmp_path / "outside")
        require_refused(kind, source, target, "symlink", str(directory))
        directory.unlink()
        shutil.move(tmp_path / "outside", directory)


@pytest.mark.parametrize("payload_name", PAYLOADS)
@pytest.mark.parametrize("name", SAMPLES)
def test_call_in_a_pickle_is_never_made(name, payload_name, copy_of, tmp_path):
    source, target, kind = copy_of(name), tmp_path / "out", SAMPLES[name][0]
    marker = tmp_path / "marker"
    call = payload(payload_name, str(marker))

    for file in files_of(source):
        path, content = source / file, (source / file).read_bytes()
        if path.suffix == ".pt":
            rewrite_pickle(path, lambda pickled: with_call(pickled, call))
        elif path.name == ".metadata":
            path.write_bytes(with_call(content, call))
        else:
            continue
        words = () if name.endswith("digests") else (call.name, str(path))
        require_refused(kind, source, target, *words)
        path.write_bytes(content)

    assert not marker.exists()


@pytest.mark.parametrize(
    ("name", "item"),
    [
        ("dcp", "model.w"),
        ("dcp", "step"),
        ("nemo", "model.w"),
        ("nemo", "common_state/shard_0_1"),
        ("nemo", "extra/shard_1_2"),
    ],
)
def test_call_in_an_item_is_never_made(name, item, copy_of, tmp_path):
    source, kind, marker = copy_of(name), SAMPLES[name][0], tmp_path / "marker"
    call = payload("os.system", str(marker))

    rewrite_item(source, item, lambda pickled: pickled)
    getattr(importers, kind)(source, tmp_path / "good")
    rewrite_item(source, item, lambda pickled: with_call(pickled, call))

    require_refused(kind, source, tmp_path / "out", "os.system", item)
    assert not marker.exists()


class Caller:
    """Calls what it was told to when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def test_object_that_calls_is_refused_where_dcp_itself_runs_it(tmp_path):
    import torch.distributed.checkpoint as dcp

    source, marker = tmp_path / "source", tmp_path / "marker"
    make_dcp(source, notes=Caller(marker))

    require_refused("dcp", source, tmp_path / "out", "system", "notes")

    assert not marker.exists()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load({"notes": None}, checkpoint_id=source)
    assert marker.exists()  # so the test would have seen it


def test_call_in_metadata_is_made_by_python_itself(copy_of, tmp_path):
    source, marker = copy_of("dcp"), tmp_path / "marker"
    content = (source / ".metadata").read_bytes()

    pickle.loads(with_call(content, payload("os.system", str(marker))))

    assert marker.exists()  # so the tests above would have seen it


@pytest.mark.parametrize(
    "path", ["../outside", "{outside}", "x/../../outside", "./../outside", "", "."]
)
@pytest.mark.parametrize("name", ["dcp", "nemo"])
def test_item_outside_of_the_checkpoint_is_refused(name, path, copy_of, tmp_path):
    source, kind, outside = copy_of(name), SAMPLES[name][0], tmp_path / "outside"
    inside = next(source.rglob("*.distcp"))
    shutil.copy(inside, outside)
    shutil.copy(inside, inside.parents[1] / "outside")
    relative = path.format(outside=outside)

    def leave(metadata):
        for info in metadata.storage_data.values():
            info.relative_path = relative

    rewrite_metadata(source, leave)

    require_refused(kind, source, tmp_path / "out", "plain path inside")


@pytest.mark.parametrize(
    "tag", ["../outside", "{outside}", "global_step2/../../outside", "..", "/"]
)
@pytest.mark.parametrize("name", ["zero 1", "zero 3", "universal", "nemo"])
def test_latest_outside_of_the_checkpoint_is_refused(name, tag, copy_of, tmp_path):
    source, kind, outside = copy_of(name), SAMPLES[name][0], tmp_path / "outside"
    latest = next(path for path in source.iterdir() if path.name.startswith("latest"))
    shutil.copytree(next(path for path in source.iterdir() if path.is_dir()), outside)
    latest.write_text(tag.format(outside=outside))

    require_refused(kind, source, tmp_path / "out", str(latest.parent))


@pytest.mark.parametrize("name", SAMPLES)
def test_fifo_in_place_of_a_file_does_not_hang(name, copy_of, tmp_path):
    source, target, kind = copy_of(name), tmp_path / "out", SAMPLES[name][0]

    for file in files_of(source):
        content = (source / file).read_bytes()
        (source / file).unlink()
        os.mkfifo(source / file)
        require_refused(kind, source, target)
        (source / file).unlink()
        (source / file).write_bytes(content)


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("name", ["dcp", "zero 1"])
def test_pickle_that_asks_for_much_is_refused_soon(name, bomb, copy_of, tmp_path):
    source, kind = copy_of(name), SAMPLES[name][0]
    if kind == "dcp":
        path = source / ".metadata"
        path.write_bytes(BOMBS[bomb])
    else:
        path = next(source.rglob("*model_states.pt"))
        rewrite_pickle(path, lambda _: BOMBS[bomb])

    begin_s = time.process_time()
    tracemalloc.start()
    require_refused(kind, source, tmp_path / "out", path.name)
    peak_nbytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak_nbytes < 512 << 20
    assert time.process_time() - begin_s < 30


def test_compressed_file_is_refused(copy_of, tmp_path):
    source = copy_of("zero 1")
    path = next(source.rglob("*model_states.pt"))
    rewrite_pickle(path, lambda pickled: pickled, zipfile.ZIP_DEFLATED)

    require_refused("deepspeed", source, tmp_path / "out", "compress", str(path))


def test_shape_that_no_file_can_hold_is_refused(copy_of, tmp_path):
    import torch

    source = copy_of("dcp")

    def enlarge(metadata):
        entry = metadata.state_dict_metadata["model.w"]
        entry.size = entry.chunks[0].sizes = torch.Size((1 << 30, 1 << 20))

    rewrite_metadata(source, enlarge)

    require_refused(
        "dcp", source, tmp_path / "out", "model.w", "of 4503599627370496 bytes"
    )


def storages_in(path):
    """Yield where the bytes of tensors are in a file of one or more of torch's zips."""
    content = path.read_bytes()
    for match in re.finditer(rb"PK\x03\x04.{22}(..)(..)", content, re.DOTALL):
        name_nbytes, more = (int.from_bytes(n, "little") for n in match.groups())
        name = content[match.end() : match.end() + name_nbytes]
        if re.search(rb"/data/\d+$", name):
            yield match.end() + name_nbytes + more


@pytest.mark.parametrize("name", SAMPLES)
def test_flipped_bit_of_a_tensor_is_an_error(name, copy_of, tmp_path):
    source, target, kind = copy_of(name), tmp_path / "out", SAMPLES[name][0]

    files = files_of(source)
    if name == "universal":  # its masters are newer than the model's own file
        files = [file for file in files if "model_states" not in file.name]
    places = [(file, at) for file in files for at in storages_in(source / file)]
    for file, position in places:
        flip(source / file, position, 6)
        error = refusal_of(kind, source, target)
        assert isinstance(error, CorruptShardError), (file, position, error)
        assert str(source / file) in str(error)
        flip(source / file, position, 6)

    assert places


@pytest.mark.parametrize("name", SAMPLES)
def test_import_on_three_ranks_is_the_same(name, copy_of, tmp_path):
    source, kind = copy_of(name), SAMPLES[name][0]
    getattr(importers, kind)(source, tmp_path / "one")

    results = run_ranks(
        3, lambda comm: getattr(importers, kind)(source, tmp_path / "three", comm=comm)
    )

    assert [type(result) for result in results] == [SaveResult] * 3, results
    assert tree_of(tmp_path / "three") == tree_of(tmp_path / "one")


@pytest.mark.parametrize("name", SAMPLES)
def test_damage_that_one_rank_reads_is_an_error_on_all(name, copy_of, tmp_path):
    source, target, kind = copy_of(name), tmp_path / "out", SAMPLES[name][0]
    file = [f for f in files_of(source) if [*storages_in(source / f)]][-1]
    flip(source / file, [*storages_in(source / file)][-1], 6)

    errors = run_ranks(
        3, lambda comm: getattr(importers, kind)(source, target, comm=comm)
    )

    assert [type(error) for error in errors] == [CorruptShardError] * 3, errors
    assert len({str(error) for error in errors}) == 1
    assert files_left(target) == []

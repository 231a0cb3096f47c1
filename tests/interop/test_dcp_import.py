"""Checkpoints of torch.distributed.checkpoint as ours, bit for bit."""

import pickle  # noqa: TID251  to forge metadata
import shutil
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

import mpickpt
from mpickpt import (
    CheckpointNotFoundError,
    CorruptShardError,
    IncompleteCheckpointError,
    LayoutError,
    ManifestError,
)
from mpickpt.interop.dcp.importer import dcp
from tests.mpi_launch import finish, start

torch = pytest.importorskip("torch")
from torch.distributed import checkpoint as torch_dcp  # noqa: E402
from torch.distributed.checkpoint.metadata import (  # noqa: E402
    ChunkStorageMetadata,
    MetadataIndex,
)

from tests.interop.torch_compare import (  # noqa: E402
    assert_same,
    loaded_by_dcp,
    loaded_by_us,
)

PROGRAMS = Path(__file__).with_name("programs")
CASES = ("fsdp2", "fsdp2-async", "hsdp", "fsdp1", "dtensor")
TIMEOUT_S = 280


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """Checkpoints that four ranks of torch have just saved."""
    folder = tmp_path_factory.mktemp("dcp")
    program = str(PROGRAMS / "make_dcp.py")
    outcome = finish(
        start(["-m", "mpi4py", program, str(folder), *CASES, "alone"], size=4),
        TIMEOUT_S,
    )
    assert "alone made" in outcome.output, outcome.output[-10_000:]
    return folder


def save(state, path, **how):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_dcp.save(state, checkpoint_id=str(path), **how)
    return path


def our_names(state):
    return {"optimizer" if key == "optim" else key: state[key] for key in state}


def change_metadata(path, change):
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("case", CASES)
def test_import_equals_what_dcp_loads(case, samples, tmp_path):
    result = dcp(samples / case, tmp_path / "ours")

    expected = loaded_by_dcp(samples / case)
    assert_same(loaded_by_us(tmp_path / "ours"), our_names(expected))
    assert result.step == expected["step"]


def test_imported_state_trains_on_in_torch(samples, tmp_path):
    """What FSDP2 saved on four ranks is loaded by a module of one process."""
    mpickpt_torch = pytest.importorskip("mpickpt.torch")
    dcp(samples / "fsdp2", tmp_path / "ours")
    model = torch.nn.Sequential(
        torch.nn.Embedding(197, 24),
        torch.nn.Linear(24, 32),
        torch.nn.LayerNorm(32),
        torch.nn.Linear(32, 197, bias=False),
        torch.nn.Linear(13, 7),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    state = mpickpt_torch.adapt({"model": model, "optimizer": optimizer})

    path = tmp_path / "ours"
    mpickpt.load_sharded(path, like=state, reshard=True, unexpected="ignore")

    expected = loaded_by_dcp(samples / "fsdp2")
    assert all(
        torch.equal(model.state_dict()[name], tensor)
        for name, tensor in expected["model"].items()
    )
    assert optimizer.param_groups[0]["lr"] == 1e-3
    for name, parameter in model.named_parameters():
        for slot, tensor in expected["optim"]["state"][name].items():
            assert torch.equal(optimizer.state[parameter][slot], tensor), (name, slot)


def test_manifest_says_where_it_came_from(samples, tmp_path):
    dcp(samples / "fsdp2", tmp_path / "ours", step=40)

    manifest = mpickpt.read_manifest(tmp_path / "ours")
    assert manifest.step == 40
    assert manifest.metadata == {
        "imported": {"from": "torch DCP 1.0.0", "source": str(samples / "fsdp2")}
    }


@pytest.mark.parametrize("size", [2, 3])
def test_import_on_several_ranks_reads_each_item_on_one(size, samples, tmp_path):
    program = PROGRAMS / "import_checkpoint.py"
    arguments = ["-m", "mpi4py", str(program), "dcp", str(samples / "fsdp2")]

    outcome = finish(start([*arguments, str(tmp_path / "ours")], size=size), TIMEOUT_S)

    assert outcome.returncode == 0, outcome.output
    manifest = mpickpt.read_manifest(tmp_path / "ours")
    sizes = [shard.nbytes for shard in manifest.shards]
    assert len(sizes) == size
    assert max(sizes) < 1.3 * min(sizes)
    expected = loaded_by_dcp(samples / "fsdp2")
    assert_same(loaded_by_us(tmp_path / "ours"), our_names(expected))


def test_damaged_item_fails_all_ranks_and_publishes_nothing(samples, tmp_path):
    source = shutil.copytree(samples / "fsdp2", tmp_path / "source")
    flip_first_storage(source / "__3_0.distcp")
    program = PROGRAMS / "import_checkpoint.py"
    arguments = ["-m", "mpi4py", str(program), "dcp", str(source)]

    outcome = finish(start([*arguments, str(tmp_path / "ours")], size=2), TIMEOUT_S)

    assert outcome.output.count("CorruptShardError") == 2, outcome.output
    assert str(source / "__3_0.distcp") in outcome.output
    assert not (tmp_path / "ours" / "manifest.json").exists()


def flip_first_storage(path):
    content = bytearray(path.read_bytes())
    content[content.index(b"archive/data/0") + 200] ^= 4
    path.write_bytes(content)


def test_import_keeps_all_types_and_forms(tmp_path):
    floats = ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"]
    numbers = torch.arange(24.0).reshape(4, 6)
    state = {
        "types": {
            name: numbers.to(getattr(torch, name))
            for name in (
                *floats,
                "bfloat16",
                "float16",
                "float64",
                "complex64",
                "bool",
                "int8",
                "uint8",
                "int16",
                "int64",
                "uint16",
                "uint32",
            )
        },
        "forms": {
            "turned": numbers.t(),
            "strided": numbers[:, ::2],
            "scalar": torch.tensor(3.5),
            "empty": torch.zeros(0, 5),
            "parameter": torch.nn.Parameter(numbers[1]),
            "large": torch.randn(2500, 2100).t(),
        },
        "plain": {
            "none": None,
            "flag": True,
            "large": 2**70,
            "float": float("inf"),
            "complex": 1 + 2j,
            "text": "läuft",
            "bytes": b"\0\xff",
            "list": [1, [2, (3, "x")], {"k": 1}],
        },
        "step": 12,
    }
    save(state, tmp_path / "dcp")

    dcp(tmp_path / "dcp", tmp_path / "ours")

    assert_same(loaded_by_us(tmp_path / "ours"), state)


def test_import_of_settings_and_numpy_arrays_makes_plain_values(tmp_path):
    import argparse
    import collections
    import pathlib
    import types

    state = {
        "args": argparse.Namespace(lr=0.1, path=pathlib.PosixPath("/a/b"), inner=None),
        "simple": types.SimpleNamespace(dtype=torch.bfloat16, names={"b", "a"}),
        "ordered": [collections.OrderedDict(a=1)],
        "state": np.random.default_rng(1).bit_generator.state["state"],
        "legacy": np.random.RandomState(3).get_state(),
        "arrays": (np.arange(6.0).reshape(2, 3).T, np.float32(2.5)),
    }
    save(state, tmp_path / "dcp")

    dcp(tmp_path / "dcp", tmp_path / "ours")

    ours = loaded_by_us(tmp_path / "ours")
    assert ours["args"] == {"lr": 0.1, "path": "/a/b", "inner": None}
    assert ours["simple"] == {"dtype": "torch.bfloat16", "names": ["a", "b"]}
    assert ours["ordered"] == [{"a": 1}]
    assert ours["state"] == state["state"]
    assert_same(ours["legacy"][1], state["legacy"][1])
    assert_same(ours["arrays"][0], state["arrays"][0])
    assert ours["arrays"][1] == np.float32(2.5)


def test_optim_keeps_its_name_when_it_is_no_optimizer(tmp_path):
    save({"optim": {"state": {"w": 1}, "more": 2}}, tmp_path / "dcp")

    dcp(tmp_path / "dcp", tmp_path / "ours")

    assert loaded_by_us(tmp_path / "ours") == {"optim": {"state": {"w": 1}, "more": 2}}


def test_skip_leaves_out_what_matches_and_says_so(samples, tmp_path):
    dcp(samples / "fsdp2", tmp_path / "ours", skip=["optim.*", "lr"])

    assert set(loaded_by_us(tmp_path / "ours")) == {"model", "step"}
    skipped = mpickpt.read_manifest(tmp_path / "ours").metadata["imported"]["skipped"]
    assert "lr" in skipped
    assert "optim.param_groups.0.betas" in skipped


def test_existing_destination_is_kept_unless_overwritten(tmp_path):
    save({"w": torch.ones(3)}, tmp_path / "dcp")
    dcp(tmp_path / "dcp", tmp_path / "ours")

    with pytest.raises(mpickpt.CheckpointExistsError):
        dcp(tmp_path / "dcp", tmp_path / "ours")

    dcp(tmp_path / "dcp", tmp_path / "ours", overwrite=True, step=3)
    assert mpickpt.read_manifest(tmp_path / "ours").step == 3


class Unknown:
    pass


def test_object_of_an_unknown_class_is_refused_by_name_and_can_be_skipped(tmp_path):
    save({"w": torch.ones(3), "odd": Unknown()}, tmp_path / "dcp")

    with pytest.raises(ManifestError, match="Unknown") as caught:
        dcp(tmp_path / "dcp", tmp_path / "ours")

    assert "__0_0.distcp" in str(caught.value)
    assert not (tmp_path / "ours").exists()
    dcp(tmp_path / "dcp", tmp_path / "ours", skip=["odd"])
    assert set(loaded_by_us(tmp_path / "ours")) == {"w"}


def test_save_without_collectives_is_refused(samples, tmp_path):
    with pytest.raises(ManifestError, match="use_collectives=False"):
        dcp(samples / "alone", tmp_path / "ours")


def test_unfinished_save_is_refused(tmp_path):
    save({"w": torch.ones(3)}, tmp_path / "dcp")
    (tmp_path / "dcp" / ".metadata").rename(tmp_path / "dcp" / ".metadata.tmp")

    with pytest.raises(IncompleteCheckpointError, match="not finished"):
        dcp(tmp_path / "dcp", tmp_path / "ours")


@pytest.mark.parametrize("place", ["nowhere", "."])
def test_directory_without_metadata_is_not_found(place, tmp_path):
    with pytest.raises(CheckpointNotFoundError):
        dcp(tmp_path / place, tmp_path / "ours")


def test_huggingface_files_are_refused_by_name(tmp_path):
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / "model-00001-of-00001.safetensors").touch()

    with pytest.raises(ManifestError, match="HuggingFaceStorageWriter"):
        dcp(tmp_path / "dcp", tmp_path / "ours")


def test_file_cut_off_is_incomplete(tmp_path):
    save({"w": torch.ones(3)}, tmp_path / "dcp")
    path = tmp_path / "dcp" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(IncompleteCheckpointError, match="cut off"):
        dcp(tmp_path / "dcp", tmp_path / "ours")


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "a/../../b", ""])
def test_path_that_leaves_the_checkpoint_is_refused(name, tmp_path):
    save({"w": torch.ones(3)}, tmp_path / "dcp")

    def move(metadata):
        for info in metadata.storage_data.values():
            info.relative_path = name

    change_metadata(tmp_path / "dcp", move)

    with pytest.raises(ManifestError, match="plain path"):
        dcp(tmp_path / "dcp", tmp_path / "ours")


def test_item_of_another_shape_than_the_metadata_says_is_refused(tmp_path):
    save({"w": torch.ones(6, 2)}, tmp_path / "dcp")

    def reshape(metadata):
        entry = metadata.state_dict_metadata["w"]
        entry.size = torch.Size([2, 6])
        entry.chunks = [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 6]))]

    change_metadata(tmp_path / "dcp", reshape)

    with pytest.raises(ManifestError, match="the item holds"):
        dcp(tmp_path / "dcp", tmp_path / "ours")


def test_chunks_that_leave_a_gap_are_refused(tmp_path):
    save({"w": torch.ones(6)}, tmp_path / "dcp")

    def widen(metadata):
        metadata.state_dict_metadata["w"].size = torch.Size([7])

    change_metadata(tmp_path / "dcp", widen)

    with pytest.raises(LayoutError, match="w"):
        dcp(tmp_path / "dcp", tmp_path / "ours")


def version(metadata):
    metadata.version = "2.0.0"


def transforms(metadata):
    for info in metadata.storage_data.values():
        info.transform_descriptors = ["zstd"]


def without_item(metadata):
    metadata.storage_data.clear()


def with_item_of_nothing(metadata):
    info = next(iter(metadata.storage_data.values()))
    metadata.storage_data[MetadataIndex("v", torch.Size([0]))] = info


def outside(metadata):
    metadata.state_dict_metadata["w"].chunks[0].sizes = torch.Size([9])


def another_name(metadata):
    metadata.planner_data["w"] = ("v",)


def without_chunks(metadata):
    metadata.state_dict_metadata["w"].chunks = []


def without_planner(metadata):
    del metadata.planner_data


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (version, "of a version other"),
        (transforms, "transform"),
        (without_item, "no place"),
        (with_item_of_nothing, "items of nothing"),
        (outside, "does not lie inside"),
        (another_name, "another name"),
        (without_chunks, "without chunks"),
        (without_planner, "planner_data"),
    ],
)
def test_metadata_that_does_not_fit_together_is_refused(change, word, tmp_path):
    save({"w": torch.ones(6)}, tmp_path / "dcp")
    change_metadata(tmp_path / "dcp", change)

    with pytest.raises(ManifestError, match=word):
        dcp(tmp_path / "dcp", tmp_path / "ours")


def test_items_that_overlap_are_refused(tmp_path):
    save({"w": torch.ones(6), "v": torch.ones(6)}, tmp_path / "dcp")

    def overlap(metadata):
        first, second = metadata.storage_data.values()
        second.offset = first.offset + 1

    change_metadata(tmp_path / "dcp", overlap)

    with pytest.raises(ManifestError, match="overlap"):
        dcp(tmp_path / "dcp", tmp_path / "ours")


def test_damaged_storage_is_found_by_its_checksum(tmp_path):
    save({"w": torch.ones(600)}, tmp_path / "dcp")
    flip_first_storage(tmp_path / "dcp" / "__0_0.distcp")

    with pytest.raises(CorruptShardError, match="CRC-32"):
        dcp(tmp_path / "dcp", tmp_path / "ours")


def test_import_needs_no_torch(tmp_path):
    import subprocess

    state = {"model": {"w": torch.ones(3, dtype=torch.bfloat16)}, "step": 3}
    save(state, tmp_path / "dcp")
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['mpi4py'] = None; "
        "from mpickpt import importers; importers.dcp(*sys.argv[1:])"
    )

    places = [str(tmp_path / "dcp"), str(tmp_path / "ours")]
    subprocess.run([sys.executable, "-c", code, *places], check=True)

    assert_same(loaded_by_us(tmp_path / "ours"), state)


def surrogate(metadata):
    metadata.state_dict_metadata["\ud800"] = metadata.state_dict_metadata.pop("w")


def deep(metadata):
    name = ".".join("a" * 2000)
    entry = metadata.state_dict_metadata.pop("w")
    (index, info), *_ = metadata.storage_data.items()
    metadata.storage_data = {MetadataIndex(name, index.offset): info}
    metadata.state_dict_metadata[name] = entry
    metadata.planner_data = {name: tuple("a" * 2000)}


@pytest.mark.parametrize("change", [surrogate, deep])
def test_name_that_cannot_be_ours_is_refused(change, tmp_path):
    save({"w": torch.ones(6)}, tmp_path / "dcp")
    change_metadata(tmp_path / "dcp", change)

    with pytest.raises(ManifestError, match=r"no text|path that is none"):
        dcp(tmp_path / "dcp", tmp_path / "ours")


@pytest.mark.parametrize("places", [(0, 2), (1,), (10**9,)])
def test_list_with_a_gap_is_refused(places, tmp_path):
    save({"w": torch.ones(6), "v": torch.ones(6)}, tmp_path / "dcp")

    def in_a_list(metadata):
        for place, old in zip(places, list(metadata.state_dict_metadata), strict=False):
            name = f"list.{place}"
            metadata.state_dict_metadata[name] = metadata.state_dict_metadata.pop(old)
            metadata.planner_data[name] = ("list", place)
            for index in list(metadata.storage_data):
                if index.fqn == old:
                    info = metadata.storage_data.pop(index)
                    metadata.storage_data[MetadataIndex(name, index.offset)] = info

    change_metadata(tmp_path / "dcp", in_a_list)

    with pytest.raises(ManifestError, match="count from 0"):
        dcp(tmp_path / "dcp", tmp_path / "ours")

"""Distributed checkpoints of Megatron-core and NeMo as ours, bit for bit."""

import hashlib
import itertools
import json
import math
import pickle  # noqa: TID251  to forge metadata
import shutil
import sys
import warnings
from pathlib import Path

import pytest

import mpickpt
from mpickpt import (
    CheckpointNotFoundError,
    CorruptShardError,
    IncompleteCheckpointError,
    ManifestError,
)
from mpickpt.interop.nemo.importer import nemo
from mpickpt.interop.nemo.names import Naming
from tests.interop.foreign_samples import make_nemo
from tests.mpi_launch import finish, start

torch = pytest.importorskip("torch")

from tests.interop.torch_compare import assert_same, loaded_by_us  # noqa: E402

PROGRAMS = Path(__file__).with_name("programs")
TIMEOUT_S = 280
ITERATION = "iter_0000100"


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    """The directory of a training of four ranks that Megatron-core has just saved."""
    pytest.importorskip("megatron.core")
    folder = tmp_path_factory.mktemp("megatron") / "training"
    program = str(PROGRAMS / "make_megatron.py")
    outcome = finish(start([program, str(folder)], size=4), TIMEOUT_S)
    assert "made" in outcome.output, outcome.output[-10_000:]
    return folder


@pytest.fixture
def small(tmp_path):
    """A checkpoint in the same layout, made by DCP alone; it can be damaged."""
    make_nemo(tmp_path / "training")
    return tmp_path / "training"


def expected_tree(loaded):
    """Return what Megatron-core loaded, in the places where we put it."""
    tree = {"model": {}, "master": {}, "optimizer": {"state": {}}}
    for name, tensor in loaded.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        if not name.startswith("optimizer.state."):
            tree["model"][name] = tensor
            continue
        slot, weight = name.removeprefix("optimizer.state.").split(".", 1)
        if slot == "fp32_param":
            tree["master"][weight] = tensor
        else:
            tree["optimizer"]["state"].setdefault(weight, {})[slot] = tensor
    return tree


def add_digests(iteration, **changed):
    digests = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in iteration.iterdir()
    }
    document = {"algorithm": "sha256", "files": {**digests, **changed}}
    (iteration / "integrity.json").write_text(json.dumps(document))


def test_import_equals_what_megatron_loads(training, tmp_path):
    result = nemo(training, tmp_path / "ours")

    ours = loaded_by_us(tmp_path / "ours")
    extra = ours.pop("extra")
    loaded = torch.load(training / "expected.pt", weights_only=False)
    assert_same(ours, expected_tree(loaded))
    assert result.step == 100
    common = extra["common"]
    assert common.pop("args") == {
        "hidden_size": 16,
        "params_dtype": "torch.bfloat16",
        "attention_backend": 1,
        "exit_signal": 15,
        "save": "/runs/one",
        "betas": (0.9, 0.95),
    }
    assert common == {
        "iteration": 100,
        "opt_param_scheduler": {"max_lr": 1e-3, "num_steps": 1600},
    }
    objects = extra["objects"]["rng_state"]
    assert sorted(objects) == ["shard_0.0_1.2", "shard_0.1_1.2"]
    state = {"random": (3, (1, 2), None), "torch": torch.arange(16, dtype=torch.uint8)}
    assert_same(objects["shard_0.1_1.2"], [state])


def test_import_on_two_ranks_is_the_same(training, tmp_path):
    program = str(PROGRAMS / "import_checkpoint.py")
    arguments = ["-m", "mpi4py", program, "nemo", str(training), str(tmp_path / "two")]

    outcome = finish(start(arguments, size=2), TIMEOUT_S)
    nemo(training, tmp_path / "one")

    assert outcome.returncode == 0, outcome.output
    assert len(mpickpt.read_manifest(tmp_path / "two").shards) == 2
    both = [repr(loaded_by_us(tmp_path / name)) for name in ("one", "two")]
    assert both[0] == both[1]


@pytest.mark.parametrize("place", ["", ITERATION])
def test_training_and_iteration_are_one(place, small, tmp_path):
    nemo(small / place, tmp_path / "ours")

    ours = loaded_by_us(tmp_path / "ours")
    assert set(ours["model"]) == {"w"}
    assert set(ours["optimizer"]["state"]["w"]) == {"exp_avg"}
    assert ours["extra"]["common"] == {"iteration": 100, "args": {"hidden": 5}}
    assert ours["extra"]["objects"]["extra"]["shard_1_2"] == {"tp": 1}


def test_iteration_is_chosen(small, tmp_path):
    shutil.copytree(small / ITERATION, small / "iter_0000050")

    nemo(small, tmp_path / "ours", iteration=50)

    manifest = mpickpt.read_manifest(tmp_path / "ours")
    assert manifest.metadata["imported"]["source"] == str(small)
    with pytest.raises(CheckpointNotFoundError, match="iter_0000050, iter_0000100"):
        nemo(small, tmp_path / "none", iteration=70)


def test_release_is_found(small, tmp_path):
    (small / ITERATION).rename(small / "release")
    (small / "latest_checkpointed_iteration.txt").write_text("release\n")

    nemo(small, tmp_path / "ours")

    assert "model" in loaded_by_us(tmp_path / "ours")


def test_weights_of_nemo_are_found(small, tmp_path):
    checkpoint = tmp_path / "model--step=9"
    shutil.copytree(small / ITERATION, checkpoint / "weights")
    (checkpoint / "context").mkdir()

    nemo(checkpoint, tmp_path / "ours", step=9)

    assert mpickpt.read_manifest(tmp_path / "ours").step == 9


def test_unfinished_checkpoint_of_nemo_is_refused(small, tmp_path):
    checkpoint = tmp_path / "model--step=9"
    shutil.copytree(small / ITERATION, checkpoint / "weights")
    (tmp_path / "model--step=9-unfinished").touch()

    with pytest.raises(IncompleteCheckpointError, match="unfinished"):
        nemo(checkpoint, tmp_path / "ours")


def test_iteration_without_its_last_file_is_refused(small, tmp_path):
    (small / ITERATION / "metadata.json").unlink()

    with pytest.raises(IncompleteCheckpointError, match="writes last"):
        nemo(small, tmp_path / "ours")


def test_training_without_its_tracker_needs_a_choice(small, tmp_path):
    (small / "latest_checkpointed_iteration.txt").unlink()

    with pytest.raises(CheckpointNotFoundError, match=r"iteration=\.\.\."):
        nemo(small, tmp_path / "ours")


@pytest.mark.parametrize("tracker", ["../..", "iter_0000100", "", "-1"])
def test_tracker_that_holds_no_iteration_is_refused(tracker, small, tmp_path):
    (small / "latest_checkpointed_iteration.txt").write_text(tracker)

    with pytest.raises(ManifestError, match="no iteration"):
        nemo(small, tmp_path / "ours")


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ('{"sharded_backend": "zarr", "sharded_backend_version": 1}', "zarr"),
        ('{"sharded_backend": "torch_dist", "sharded_backend_version": 9}', "9"),
        ("[]", "no JSON object"),
        ("{", "no JSON"),
    ],
)
def test_backend_that_is_not_known_is_refused(config, word, small, tmp_path):
    (small / ITERATION / "metadata.json").write_text(config)

    with pytest.raises(ManifestError, match=word):
        nemo(small, tmp_path / "ours")


def test_legacy_format_is_refused_by_name(tmp_path):
    (tmp_path / "iter" / "mp_rank_00").mkdir(parents=True)

    with pytest.raises(ManifestError, match="legacy"):
        nemo(tmp_path / "iter", tmp_path / "ours")


def test_digests_of_the_source_are_verified(small, tmp_path):
    add_digests(small / ITERATION)

    nemo(small, tmp_path / "ours")

    assert "model" in loaded_by_us(tmp_path / "ours")


def test_file_that_differs_from_its_digest_is_refused(small, tmp_path):
    add_digests(small / ITERATION, **{".metadata": "0" * 64})

    with pytest.raises(CorruptShardError, match="SHA-256"):
        nemo(small, tmp_path / "ours")

    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("document", "word"),
    [
        ({"algorithm": "md5", "files": {}}, "md5"),
        ({"algorithm": "sha256", "files": {"../x": "0" * 64}}, "plain path"),
        ({"algorithm": "sha256", "files": {"x": "nothing"}}, "no SHA-256"),
        ({"algorithm": "sha256", "files": {"metadata.json": "0" * 64}}, "without"),
        ({"algorithm": "sha256", "files": {}}, "without"),
    ],
)
def test_digests_that_do_not_fit_are_refused(document, word, small, tmp_path):
    (small / ITERATION / "integrity.json").write_text(json.dumps(document))

    with pytest.raises(ManifestError, match=word):
        nemo(small, tmp_path / "ours")


def flattened(path, whole, parts, cuts, true_shape):
    """Save as Megatron-core 0.13 did: blocks flattened, and cut at any element."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
    )

    pieces, places = {}, {}
    for index in itertools.product(*map(range, parts)):
        block = whole
        for axis, (part, count) in enumerate(zip(index, parts, strict=True)):
            block = block.chunk(count, axis)[part]
        flat = block.reshape(-1)
        for first, last in itertools.pairwise([0, *cuts, flat.numel()]):
            name = f"piece {len(pieces)}"
            ones = (1,) * len(parts)
            pieces[name] = flat[first:last].clone().reshape(*ones, -1)
            places[name] = torch.Size([*index, first])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model.w": whole.bfloat16(), **pieces}, checkpoint_id=str(path))
    metadata = pickle.loads((path / ".metadata").read_bytes())
    name, entries = "optimizer.state.exp_avg.model.w", metadata.state_dict_metadata
    entry = entries["piece 0"]
    entry.size = torch.Size([*parts, whole.numel() // math.prod(parts)])
    entry.chunks = [
        ChunkStorageMetadata(places[piece], pieces[piece].shape) for piece in pieces
    ]
    entries[name] = entry
    for index in [i for i in metadata.storage_data if i.fqn in pieces]:
        info = metadata.storage_data.pop(index)
        metadata.storage_data[MetadataIndex(name, places[index.fqn])] = info
    for piece in pieces:
        del entries[piece]
    metadata.planner_data = None
    metadata.mcore_data = {
        name: {"nd_reformulated_orig_global_shape": true_shape},
        "model.w": {},
    }
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (path / "metadata.json").write_text(json.dumps(config))
    torch.save({"iteration": 100}, path / "common.pt")


@pytest.mark.parametrize(
    ("shape", "parts", "cuts"),
    [
        ((6, 8), (1, 2), (11,)),
        ((6, 8), (2, 2), ()),
        ((3, 4, 6), (3, 2, 1), (5, 6)),
        ((12,), (3,), (1, 3)),
        ((2, 2, 2, 2), (1, 1, 1, 1), (1, 4, 11, 15)),
    ],
)
def test_optimizer_that_was_flattened_has_its_shape_again(shape, parts, cuts, tmp_path):
    whole = torch.arange(float(math.prod(shape))).reshape(shape)
    flattened(tmp_path / "source", whole, parts, cuts, shape)

    nemo(tmp_path / "source", tmp_path / "ours")

    ours = loaded_by_us(tmp_path / "ours")
    assert_same(ours["optimizer"]["state"]["w"]["exp_avg"], whole)
    assert_same(ours["model"]["w"], whole.bfloat16())


@pytest.mark.parametrize("shape", [(6, 9), (12, 6), (48,), (6, 8, 1), ()])
def test_flattened_state_that_does_not_fit_its_shape_is_refused(shape, tmp_path):
    whole = torch.arange(48.0).reshape(6, 8)
    flattened(tmp_path / "source", whole, (1, 2), (11,), shape)

    with pytest.raises(ManifestError, match="flattened"):
        nemo(tmp_path / "source", tmp_path / "ours")


def test_damaged_flattened_state_is_found(tmp_path):
    whole = torch.arange(4800.0).reshape(60, 80)
    flattened(tmp_path / "source", whole, (1, 2), (1111,), (60, 80))
    path = tmp_path / "source" / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[content.index(whole[1, :20].numpy().tobytes()) + 5] ^= 1
    path.write_bytes(content)

    with pytest.raises(CorruptShardError, match="CRC-32"):
        nemo(tmp_path / "source", tmp_path / "ours")


def test_skip_leaves_out_what_matches(small, tmp_path):
    nemo(small, tmp_path / "ours", skip=["optimizer.*", "*/shard_*"])

    assert set(loaded_by_us(tmp_path / "ours")) == {"model"}


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("module.w", ("model", "w")),
        ("optimizer.state.exp_avg.module.w", ("optimizer", "state", "w", "exp_avg")),
        ("chained_1.optimizer.state.fp32_param.module.w", ("master", "w")),
        ("optim.exp_avg_sq.w", ("optimizer", "state", "w", "exp_avg_sq")),
        ("optimizer.distributed.dp_group_idx_0.x", ("optimizer", "buffers", "itself")),
    ],
)
def test_names_of_tensors(name, place):
    naming = Naming.of(["module.w", "module.b", "optimizer.state.exp_avg.module.w"])

    expected = tuple(name if part == "itself" else part for part in place)
    assert naming.tensor(name) == expected


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("common_state/shard_0_1", ("extra", "common")),
        ("a.b/shard_0.1_2.2", ("extra", "objects", "a.b", "shard_0.1_2.2")),
        ("a/b", ("extra", "objects", "a/b")),
    ],
)
def test_names_of_objects(name, place):
    assert Naming("").value(name) == place


def test_import_needs_no_megatron_and_no_torch(small, tmp_path):
    import subprocess

    code = (
        "import sys; sys.modules.update(torch=None, megatron=None, mpi4py=None); "
        "from mpickpt import importers; importers.nemo(*sys.argv[1:])"
    )

    places = [str(small), str(tmp_path / "ours")]
    subprocess.run([sys.executable, "-c", code, *places], check=True)

    assert "model" in loaded_by_us(tmp_path / "ours")

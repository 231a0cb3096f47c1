"""What an import of DeepSpeed refuses: what is missing, mixed, damaged or unknown."""

import logging
import math
import shutil

import numpy as np
import pytest

from mpickpt import CheckpointNotFoundError
from mpickpt.errors import (
    CheckpointError,
    CorruptShardError,
    IncompleteCheckpointError,
    ManifestError,
)
from mpickpt.interop.deepspeed.importer import deepspeed
from mpickpt.interop.deepspeed.tensor_parallel import TensorParallelLayout
from tests.interop.deepspeed_samples import TAG, imported
from tests.ranks_as_threads import run_ranks

torch = pytest.importorskip("torch")
from tests.interop.imitated_deepspeed import stand_ins, write_zero  # noqa: E402

SHAPES = {"a": (37, 19), "b": (13,), "c": (5, 2, 3), "d": ()}
MODEL = "mp_rank_00_model_states.pt"


def optim(rank, prefix="bf16_"):
    return f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


@pytest.fixture(params=[1, 3])
def source(request, tmp_path):
    write_zero(tmp_path / "source", SHAPES, n_ranks=3, stage=request.param)
    return tmp_path / "source"


@pytest.fixture
def zero1(tmp_path):
    write_zero(tmp_path / "source", SHAPES, n_ranks=3, stage=1)
    return tmp_path / "source"


def refused(source, kind, match):
    target = source.parent / "ours"
    with pytest.raises(kind, match=match) as raised:
        deepspeed(source, target)
    assert not (target / "manifest.json").exists()
    return raised.value


def changed(path, change):
    """Load a file, change it and save it again, under DeepSpeed's names."""
    import sys
    from unittest import mock

    with mock.patch.dict(sys.modules, stand_ins()):
        content = torch.load(path, weights_only=False)
        change(content)
        torch.save(content, path)


def test_imitation_is_imported(source):
    state = imported(source, source.parent / "ours")

    assert {name: array.shape for name, array in state["master"].items()} == SHAPES
    assert list(state["optimizer"]["state"]["c"]) == ["step", "exp_avg", "exp_avg_sq"]


def test_missing_file_of_a_rank_is_refused(source):
    (source / TAG / optim(1)).unlink()

    refused(source, IncompleteCheckpointError, "lacks|missing")


def test_missing_file_of_the_last_rank_is_refused(source):
    (source / TAG / optim(2)).unlink()

    refused(source, IncompleteCheckpointError, "of some ranks|are missing")


def test_file_left_from_more_ranks_is_refused(source):
    shutil.copy(source / TAG / optim(2), source / TAG / optim(3))

    refused(source, IncompleteCheckpointError, "of some ranks|another save")


def test_two_files_of_one_rank_are_refused(source):
    shutil.copy(source / TAG / optim(2), source / TAG / optim(2, prefix=""))

    refused(source, IncompleteCheckpointError, "two saves")


def test_missing_model_is_refused(source):
    for path in (source / TAG).glob("*model_states.pt"):
        path.unlink()

    refused(source, IncompleteCheckpointError, "model_states")


def test_file_of_another_step_is_refused(zero1):
    def later(content):
        base = content["optimizer_state_dict"]["base_optimizer_state"]
        base["state"][0]["step"] += 1

    changed(zero1 / TAG / optim(1), later)

    refused(zero1, IncompleteCheckpointError, "step.*not of one save")


def test_file_of_another_version_is_refused(zero1):
    def newer(content):
        content["ds_version"] = content["optimizer_state_dict"]["ds_version"] = "9.9"

    changed(zero1 / TAG / optim(1), newer)

    refused(zero1, IncompleteCheckpointError, "ds_version")


def test_places_that_are_not_those_of_the_shapes_are_refused(zero1):
    changed(
        zero1 / TAG / MODEL,
        lambda content: content["param_shapes"][0].move_to_end("a"),
    )

    refused(zero1, ManifestError, "param_slice_mappings")


def test_shapes_of_more_elements_than_there_are_are_refused(source):
    def grow(content):
        content["param_shapes"][0]["a"] = torch.Size((370, 19))

    for path in (source / TAG).glob("*model_states.pt"):
        changed(path, grow)

    refused(source, ManifestError, "elements")


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("layer_0_expert_1_mp_rank_00_model_states.pt", "experts"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "experts"),
        ("layer_01-model_00-model_states.pt", "pipeline"),
        ("offloaded_tensors", "NVMe"),
    ],
)
def test_other_kind_of_training_is_refused_by_name(zero1, name, match):
    (zero1 / TAG / name).touch()

    error = refused(zero1, ManifestError, match)

    assert "ds_to_universal" in str(error)


def test_unknown_class_is_refused_by_name(zero1):
    changed(
        zero1 / TAG / MODEL,
        lambda content: content.update(client=torch.nn.Linear(1, 1)),
    )

    refused(zero1, ManifestError, r"torch\.nn\.modules\.linear\.?.*Linear")


def test_latest_that_leaves_the_directory_is_refused(zero1):
    (zero1 / "latest").write_text("../source/global_step2")

    refused(zero1, ManifestError, "plain path")


def test_symlinked_file_is_refused(zero1):
    path = zero1 / TAG / optim(1)
    path.rename(zero1.parent / "elsewhere.pt")
    path.symlink_to(zero1.parent / "elsewhere.pt")

    refused(zero1, CheckpointError, "symlink|symbolic")


@pytest.mark.parametrize("tag", [None, "global_step3"])
def test_nothing_there_is_told(zero1, tag):
    (zero1 / "latest").unlink()

    with pytest.raises(CheckpointNotFoundError):
        deepspeed(zero1, zero1.parent / "ours", tag=tag)


def flip_in_storage(path):
    """Flip a bit of the last element of the largest storage."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_flipped_bit_is_an_error_on_all_ranks_and_nothing_is_published(source, n_ranks):
    flip_in_storage(source / TAG / optim(1))
    target = source.parent / "ours"

    def importing(comm):
        with pytest.raises(CorruptShardError) as raised:
            deepspeed(source, target, comm=comm if n_ranks > 1 else None)
        return str(raised.value)

    messages = run_ranks(n_ranks, importing)

    assert all(optim(1) in message and "CRC-32" in message for message in messages)
    assert not (target / "manifest.json").exists()


@pytest.mark.parametrize("fraction", [0.0, 0.2, 0.99])
def test_truncated_file_is_refused(source, fraction):
    path = source / TAG / optim(2)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * fraction)])

    refused(source, IncompleteCheckpointError, "truncated|empty")


def test_files_without_checksums_are_imported_with_a_warning(zero1, caplog):
    torch.serialization.set_crc32_options(False)
    try:
        changed(zero1 / TAG / optim(1), lambda content: None)
    finally:
        torch.serialization.set_crc32_options(True)

    with caplog.at_level(logging.WARNING):
        state = imported(zero1, zero1.parent / "ours")

    assert "without checksums" in caplog.text
    assert optim(1) in caplog.text
    assert len(state["master"]) == len(SHAPES)


def test_unnamed_states_are_left_out_with_a_warning(zero1, caplog):
    def add_errors(content):
        base = content["optimizer_state_dict"]["base_optimizer_state"]
        base["state"][0]["worker_error"] = torch.zeros(2, 2)

    for rank in range(3):
        changed(zero1 / TAG / optim(rank), add_errors)

    with caplog.at_level(logging.WARNING):
        state = imported(zero1, zero1.parent / "ours")

    assert "worker_error" in caplog.text
    assert "worker_error" not in state["optimizer"]["state"]["a"]


def test_older_alignment_of_partitions_is_understood(tmp_path):
    """Before the vectors were padded to 2 * ranks, they were to ranks alone."""
    source, numel = tmp_path / "source", sum(map(math.prod, SHAPES.values()))
    write_zero(source, SHAPES, n_ranks=3, stage=1)
    partition = -(-numel // 3)
    assert partition != -(-numel // 6) * 2
    for rank in range(3):
        own = min(partition, numel - rank * partition)
        values = torch.arange(rank * partition, (rank + 1) * partition).float()

        def older(content, own=own, values=values):
            inner = content["optimizer_state_dict"]
            del inner["param_slice_mappings"], inner["param_alignment_paddings"]
            inner["single_partition_of_fp32_groups"] = [values[:own].clone()]
            inner["base_optimizer_state"]["state"][0].update(
                exp_avg=values.clone(), exp_avg_sq=values.clone()
            )

        changed(source / TAG / optim(rank), older)

    state = imported(source, tmp_path / "ours")

    flat = [np.ravel(state["master"][name]) for name in SHAPES]
    assert np.array_equal(np.concatenate(flat), np.arange(numel))


def test_aligned_parameters_are_understood(tmp_path):
    """Newer versions leave elements that are nobody's between parameters."""
    source = tmp_path / "source"
    write_zero(source, SHAPES, n_ranks=3, stage=1)
    paddings = [3, 0, 2, 0]
    numel = [math.prod(shape) for shape in SHAPES.values()]
    partition = -(-(sum(numel) + sum(paddings)) // 6) * 2
    parts, at = [], 0
    for count, padding in zip(numel, paddings, strict=True):
        parts += [torch.arange(at, at + count).float(), torch.full((padding,), -1.0)]
        at += count
    whole = torch.cat([*parts, torch.full((partition * 3,), -1.0)])
    for rank in range(3):
        own = whole[rank * partition :][:partition].clone()

        def align(content, own=own):
            inner = content["optimizer_state_dict"]
            del inner["param_slice_mappings"]
            inner["param_alignment_paddings"] = [paddings]
            inner["single_partition_of_fp32_groups"] = [own]
            inner["base_optimizer_state"]["state"][0].update(
                exp_avg=own, exp_avg_sq=own
            )

        changed(source / TAG / optim(rank), align)

    state = imported(source, tmp_path / "ours")

    flat = [np.ravel(state["master"][name]) for name in SHAPES]
    assert np.array_equal(np.concatenate(flat), np.arange(sum(numel)))


PARTS = [{"w": (4, 6), "b": (4,)}, {"w": (4, 3), "b": (4,)}]
ROWS = {
    "parameter_with_row_parallelism_patterns": ["^w$"],
    "tp_replicated_parameter_patterns": [r"^b$"],
}


def test_tensor_parallel_parts_are_placed_by_the_patterns():
    layout = TensorParallelLayout(PARTS, ROWS, "there")

    assert layout.shape("w") == (4, 9)
    assert [layout.corner("w", tp) for tp in (0, 1)] == [(0, 0), (0, 6)]
    assert layout.shape("b") == (4,)
    assert [layout.corner("b", tp) for tp in (0, 1)] == [(0,), None]


@pytest.mark.parametrize(
    ("info", "match"),
    [
        (None, "do not say along which axis"),
        ({}, "do not fit together"),
        (ROWS | {"parameter_to_average_patterns": ["w"]}, "parameter_to_average"),
        (ROWS | {"parameter_with_sub_params": [{"patterns": ["w"]}]}, "sub_params"),
        (ROWS | {"tp_replicated_parameter_patterns": ["(a+)+w"]}, "repeated group"),
        (ROWS | {"tp_replicated_parameter_patterns": ["("]}, "pattern"),
    ],
)
def test_tensor_parallel_parts_are_refused_with_the_reason(info, match):
    with pytest.raises(ManifestError, match=match):
        TensorParallelLayout(PARTS, info, "there")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("param_shapes", {"a": 5}),
        ("param_shapes", [5]),
        ("module", [1]),
        ("shared_params", "x"),
        ("module", {"a": {"b": None}}),
    ],
)
def test_values_of_other_types_are_refused_as_ours(zero1, key, value):
    changed(zero1 / TAG / MODEL, lambda content: content.update({key: value}))

    refused(zero1, ManifestError, "param_shapes|module|DeepSpeed writes|lacks")

"""Checkpoints of DeepSpeed as ours, bit for bit what DeepSpeed loads of them."""

import numpy as np
import pytest

import mpickpt
from mpickpt.interop.ties import tied_to
from tests.interop.deepspeed_samples import (
    MORE_CASES,
    PROGRAMS,
    STEP_CASES,
    TAG,
    TENSOR_PARALLEL_CASES,
    UNIVERSAL,
    UNIVERSAL_CASES,
    differences,
    expected,
    imported,
    is_same,
    loaded,
    make,
    needs_deepspeed,
)
from tests.mpi_launch import finish, start

pytestmark = needs_deepspeed

MOMENTS = ("exp_avg", "exp_avg_sq")


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """Checkpoints that DeepSpeed has just saved, on 2 and on 4 ranks."""
    folder = tmp_path_factory.mktemp("deepspeed")
    return {size: make(folder / str(size), size) for size in (2, 4)}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", [*STEP_CASES, *MORE_CASES])
def test_import_is_what_deepspeed_loads(samples, tmp_path, case, size):
    folder = samples[size] / case

    state = imported(folder, tmp_path / "ours")

    assert differences(state, folder) == []
    assert ("master" in state) == (case != "zero0-fp32")


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", UNIVERSAL_CASES)
def test_import_of_a_universal_checkpoint_is_what_deepspeed_loads(
    samples, tmp_path, case, size
):
    folder = samples[size] / case

    state = imported(folder, tmp_path / "ours", tag=UNIVERSAL)

    assert differences(state, folder) == []
    assert float(state["optimizer"]["state"]["odd.weight"]["step"]) == 2.0
    groups = state["optimizer"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert groups[1]["params"][0] == "first.bias"


@pytest.mark.parametrize("tag", [TAG, UNIVERSAL])
@pytest.mark.parametrize("case", TENSOR_PARALLEL_CASES)
def test_import_joins_tensor_parallel_ranks_as_deepspeed_does(
    samples, tmp_path, case, tag
):
    folder = samples[4] / case

    state = imported(folder, tmp_path / "ours", tag=tag)

    assert differences(state, folder) == []
    assert state["model"]["up.weight"].shape == (34, 16)
    assert state["model"]["down.weight"].shape == (16, 34)
    for name, master in state["master"].items():
        assert np.array_equal(state["model"][name], master.astype("bfloat16"))


@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.parametrize(
    ("case", "tag"),
    [
        ("zero1-bf16", TAG),
        ("zero3-fp16", TAG),
        ("subgroups", UNIVERSAL),
        ("zero0-bf16", TAG),
        ("tensor-parallel-zero3", TAG),
    ],
)
def test_import_by_several_ranks_is_the_same(samples, tmp_path, case, tag, n_ranks):
    source, target = samples[4] / case / tag, tmp_path / "ours"
    program = str(PROGRAMS / "import_checkpoint.py")

    outcome = finish(
        start([program, "deepspeed", str(source), str(target)], size=n_ranks), 120
    )

    assert outcome.returncode == 0, outcome.output
    assert differences(loaded(target), samples[4] / case) == []
    assert mpickpt.read_manifest(target).world_size == n_ranks


def test_import_stores_tied_and_frozen_parameters_and_buffers(samples, tmp_path):
    for case in ("zero2-fp16", "zero3-fp16"):
        state = imported(samples[2] / case, tmp_path / case)

        assert tied_to(state["model"]["head.weight"]) == "embedding.weight"
        assert state["model"]["frozen.weight"].shape == (33, 33)
        assert "frozen.weight" not in state["master"]
        assert list(state["model"]["seen"]) == [0, 1, 2]


def test_import_keeps_what_is_plain(samples, tmp_path):
    extra = imported(samples[2] / "zero1-fp16", tmp_path / "ours")["extra"]

    client = extra["client_state"]
    assert (client["epoch"], client["note"]) == (1, "sample")
    assert client["arguments"] == {"layers": 3, "name": "tiny"}
    assert list(client["random"]) == [0, 1, 2, 3, 4]
    assert list(client["generator"]) == [0, 1, 2, 3]
    assert client["wanted"] == {"limits": (1, 2.5), "tags": ["a", "b"]}
    assert extra["global_steps"] == 2
    assert extra["lr_scheduler"] == {"last_batch_iteration": 1}
    assert extra["loss_scaler"]["cur_scale"] == 256
    assert extra["ds_config"]["zero_optimization"]["stage"] == 1


def test_import_keeps_parameter_groups_by_name(samples, tmp_path):
    state = imported(samples[2] / "subgroups", tmp_path / "ours")

    groups = state["optimizer"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    names = [name for group in groups for name in group["params"]]
    assert set(names) == set(state["master"])
    assert groups[0]["betas"] == (0.9, 0.999)


def test_imported_checkpoint_is_resumed_by_a_program_of_torch(samples, tmp_path):
    torch = pytest.importorskip("torch")
    from mpickpt.torch import adapt
    from tests.interop.deepspeed_models import Model, groups_of

    folder = samples[4] / "zero2-fp32"
    imported(folder, tmp_path / "ours")
    torch.manual_seed(1)
    model = Model(is_grouped=True)
    optimizer = torch.optim.AdamW(groups_of(model))

    mpickpt.load_sharded(
        tmp_path / "ours",
        like=adapt({"model": model, "optimizer": optimizer}),
        only=["model/*", "optimizer/*"],
        unexpected="ignore",
        reshard=True,
    )

    held = expected(folder)
    for name, parameter in model.named_parameters():
        assert is_same(parameter.detach().numpy(), held["model", name])
        state = optimizer.state.get(parameter, {})
        for moment in state.keys() & MOMENTS:
            assert is_same(state[moment].numpy(), held[moment, name])
    assert len(optimizer.state) == 9
    assert model.head.weight is model.embedding.weight


def test_import_says_where_it_came_from(samples, tmp_path):
    imported(samples[2] / "zero3-bf16", tmp_path / "ours")

    manifest = mpickpt.read_manifest(tmp_path / "ours")
    about = manifest.metadata["imported"]
    assert about["from"].startswith("deepspeed 0.")
    assert about["kind"] == "ZeRO stage 3"
    assert about["data_parallel_ranks"] == 2
    assert about["model_from_masters"]
    assert about["left_out"] == about["without_checksums"] == []
    assert manifest.step == 2


def test_import_takes_the_step_that_is_given(samples, tmp_path):
    imported(samples[2] / "zero1-bf16", tmp_path / "ours", step=77)

    assert mpickpt.read_manifest(tmp_path / "ours").step == 77


def test_import_follows_latest(samples, tmp_path):
    folder = samples[2] / "zero1-bf16"

    state = imported(folder, tmp_path / "ours", tag=None)

    assert differences(state, folder) == []


def test_import_verifies_every_storage_that_is_read(samples, tmp_path, monkeypatch):
    from mpickpt.interop.deepspeed import importer as deepspeed_import

    seen = []
    described = deepspeed_import.imported_state
    monkeypatch.setattr(
        deepspeed_import,
        "imported_state",
        lambda *arguments: seen.append(described(*arguments)) or seen[-1],
    )

    imported(samples[2] / "zero3-bf16", tmp_path / "ours")

    assert seen[0].reading.unread() == []


def test_expected_holds_moments_of_every_trained_parameter(samples):
    held = expected(samples[2] / "zero3-bf16")

    masters = {name for part, name in held if part == "master"}
    assert len(masters) == 9
    for moment in MOMENTS:
        assert {name for part, name in held if part == moment} == masters

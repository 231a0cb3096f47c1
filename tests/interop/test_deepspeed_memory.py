"""An import streams: its memory does not grow with the checkpoint."""

import math
import shutil

import pytest

import mpickpt
from mpickpt.interop.deepspeed.pickles import DEEPSPEED
from mpickpt.interop.sources.stored_tensor import StoredTensor
from mpickpt.interop.sources.torch_file import open_torch_file
from tests.interop.deepspeed_samples import PROGRAMS, TAG, make, needs_deepspeed
from tests.mpi_launch import finish, start

pytest.importorskip("torch")
from tests.interop.imitated_deepspeed import write_zero

MOST_MIB = 300
LARGE = {f"layers.{i}.weight": (1024, 1331) for i in range(52)} | {
    f"layers.{i}.bias": (1331,) for i in range(52)
}
NBYTES_EACH = 14  # bf16 parameter, fp32 master, two moments


@pytest.mark.parametrize("stage", [1, 3])
def test_import_of_a_gigabyte_takes_little_memory(tmp_path, stage):
    numel = sum(map(math.prod, LARGE.values()))
    assert numel * NBYTES_EACH > 0.95e9
    if shutil.disk_usage(tmp_path).free < 4 * numel * NBYTES_EACH:
        pytest.skip("too little room for a checkpoint of 1 GB and its import")
    write_zero(tmp_path / "source", LARGE, n_ranks=4, stage=stage)
    program = str(PROGRAMS / "import_within_memory.py")

    outcome = finish(
        start([program, str(tmp_path / "source"), str(tmp_path / "ours")], size=2), 200
    )

    assert outcome.returncode == 0, outcome.output
    print(f"{outcome.output.strip()} MiB above start")
    assert float(outcome.output.split()[-1]) < MOST_MIB
    manifest = mpickpt.read_manifest(tmp_path / "ours")
    assert sum(shard.nbytes for shard in manifest.shards) > numel * NBYTES_EACH
    shutil.rmtree(tmp_path)


@needs_deepspeed
def test_imitated_checkpoint_is_laid_out_as_a_real_one(tmp_path):
    make(tmp_path / "real", 2, "zero1-bf16", "zero3-bf16")
    for stage in (1, 3):
        real = tmp_path / "real" / f"zero{stage}-bf16" / TAG
        shapes = parameters_in(real)
        write_zero(tmp_path / f"imitated{stage}", shapes, n_ranks=2, stage=stage)
        imitated = tmp_path / f"imitated{stage}" / TAG

        names = sorted(path.name for path in imitated.iterdir())
        assert names == sorted(path.name for path in real.iterdir())
        for name in names:
            assert_within(layout_of(imitated / name), layout_of(real / name))


def parameters_in(folder):
    """Return the parameters of the first group, which the imitation has alone."""
    model = next(folder.glob("*model_states.pt"))
    with open_torch_file(model) as file:
        return dict(file.load(DEEPSPEED)["param_shapes"][0])


def layout_of(path):
    with open_torch_file(path) as file:
        return described(file.load(DEEPSPEED))


def described(value):
    if isinstance(value, StoredTensor):
        return ("tensor", str(value.dtype), value.shape, value.is_contiguous)
    if isinstance(value, dict):
        return {key: described(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return [described(item) for item in value]
    return type(value).__name__


def assert_within(imitated, real):
    """Assert that all that the imitation has is as in the real one."""
    if isinstance(imitated, dict):
        for key, value in imitated.items():
            assert_within(value, real[key])
    elif isinstance(imitated, list):
        for value, other in zip(imitated, real, strict=False):
            assert_within(value, other)
    elif imitated != "NoneType":
        assert imitated == real

"""Export of safetensors: what the format's own library and the hub's loader read."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import mpickpt
from mpickpt import PerRank, Replicated, Sharded
from mpickpt.interop.safetensors import export as export_safetensors
from mpickpt.interop.safetensors import staged_files as staged_files
from mpickpt.interop.safetensors.layout import Tensor, plan_files
from tests.ranks_as_threads import run_ranks
from tests.stores_double import URL, memory_store
from tests.unit.cli_runs import ROOT, flip_byte_of_shard, run

ml_dtypes = pytest.importorskip("ml_dtypes")
safetensors = pytest.importorskip("safetensors")
INDEX = "model.safetensors.index.json"
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
RNG = np.random.default_rng(8)


def saved(path, state, size=1):
    """Save `state`, or what it gives for each rank, and return the path."""

    def save_one(comm):
        tree = state(comm.rank) if callable(state) else state
        mpickpt.save_sharded(tree, path, step=3, comm=comm, overwrite=True)

    assert run_ranks(size, save_one) == [None] * size
    return path


def export(capsys, path, directory, *options):
    arguments = ["export", path, "--format", "safetensors", "-o", directory]
    return run(capsys, *arguments, *options)


def read_back(directory):
    """Return all tensors as (dtype of the format, shape, bytes)."""
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        for name, tensor in safetensors.deserialize(path.read_bytes()):
            assert name not in found
            found[name] = (tensor["dtype"], tensor["shape"], bytes(tensor["data"]))
    return found


def names_in(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("?", "BOOL"),
        ("u1", "U8"),
        ("i1", "I8"),
        ("<i2", "I16"),
        ("<u2", "U16"),
        ("<i4", "I32"),
        (">i4", "I32"),
        ("<u4", "U32"),
        ("<i8", "I64"),
        ("<u8", "U64"),
        ("<f2", "F16"),
        ("<f4", "F32"),
        (">f8", "F64"),
        ("<c8", "C64"),
        (ml_dtypes.bfloat16, "BF16"),
        (ml_dtypes.float8_e4m3fn, "F8_E4M3"),
        (ml_dtypes.float8_e5m2, "F8_E5M2"),
    ],
)
def test_export_keeps_every_bit_of_a_dtype(tmp_path, capsys, dtype, name):
    dtype = np.dtype(dtype)
    elements = RNG.integers(0, 2 if name == "BOOL" else 256, 35 * dtype.itemsize, "u1")
    array = elements.view(dtype).reshape(5, 7)
    path = saved(tmp_path / "c", {"x": array})

    status, _, _ = export(capsys, path, tmp_path / "out")

    little = array.astype(dtype.newbyteorder("<"), copy=False)
    assert status == 0
    assert read_back(tmp_path / "out") == {"x": (name, [5, 7], little.tobytes())}


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3, 4)])
def test_export_keeps_the_shape(tmp_path, capsys, shape):
    array = RNG.random(shape)
    path = saved(tmp_path / "c", {"x": array, "other": np.ones(1, "i1")})

    export(capsys, path, tmp_path / "out")

    assert read_back(tmp_path / "out")["x"] == ("F64", list(shape), array.tobytes())


def test_export_assembles_the_boxes_of_all_ranks(tmp_path, capsys):
    rows, columns = RNG.random((7, 5)), RNG.random((3, 8)).astype("f4")
    blocks = RNG.integers(0, 9, (4, 6, 2))
    flat, same = np.arange(10, dtype="i2"), RNG.random(4)

    def state(rank):
        low, high = rank * 7 // 4, (rank + 1) * 7 // 4
        part = columns[:, 2 * rank : 2 * rank + 2]
        y, x = 2 * (rank // 2), 3 * (rank % 2)
        pieces = [((rank,), flat[rank : rank + 1]), ((4 + rank,), flat[4 + rank :][:1])]
        last = [((8,), flat[8:])] if rank == 2 else []
        return {
            "model": {
                "rows": Sharded(rows[low:high], global_shape=(7, 5), offset=(low, 0)),
                "columns": Sharded(part, global_shape=(3, 8), offset=(0, 2 * rank)),
                "blocks": Sharded(
                    blocks[y : y + 2, x : x + 3],
                    global_shape=blocks.shape,
                    offset=(y, x, 0),
                ),
                "flat": Sharded.pieces([*pieces, *last], global_shape=(10,)),
                "same": Replicated(same),
            },
            "rng": PerRank(np.arange(rank)),
        }

    path = saved(tmp_path / "c", state, size=4)

    status, _, _ = export(capsys, path, tmp_path / "out")

    found = read_back(tmp_path / "out")
    expected = dict(rows=rows, columns=columns, blocks=blocks, flat=flat, same=same)
    assert status == 0
    assert {name: data for name, (_, _, data) in found.items()} == {
        name: array.tobytes() for name, array in expected.items()
    }


def test_export_without_a_model_takes_all_and_keeps_names(tmp_path, capsys):
    tree = {"layers": [{"w": np.ones(1)}, {"w": np.zeros(1)}], "a/b": np.ones(2)}
    path = saved(tmp_path / "c", tree)

    export(capsys, path, tmp_path / "out")

    assert set(read_back(tmp_path / "out")) == {"layers.0.w", "layers.1.w", "a/b"}


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        ([], {"w", "b"}),
        (["--keys", "master/*"], {"w"}),
        (["--keys", "model/*", "--keys", "step"], {"model.w", "model.b", "step"}),
        (["--keys", "optimizer"], {"optimizer.state.w.exp_avg"}),
        (["model/b"], {"b"}),
    ],
)
def test_export_chooses_by_keys(tmp_path, capsys, patterns, names):
    one = np.ones(3, "f4")
    tree = {
        "model": {"w": one, "b": one},
        "master": {"w": one},
        "optimizer": {"state": {"w": {"exp_avg": one}}},
        "step": np.array(4),
        "epoch": 2,
    }
    path = saved(tmp_path / "c", tree)

    status, _, _ = export(capsys, path, tmp_path / "out", *patterns)

    assert status == 0
    assert set(read_back(tmp_path / "out")) == names


@pytest.mark.parametrize(
    ("tree", "options", "words"),
    [
        ({"a": {"b": np.ones(1)}, "a.b": np.ones(1)}, [], "both be called 'a.b'"),
        ({"x": np.ones(1)}, ["--keys", "y*"], "no array fits 'y*'"),
        ({"t": np.array(["2020-01-01"], "M8[s]")}, [], "datetime64[s], which"),
        ({"z": np.ones(2, "c16")}, ["--dtype", "bf16"], "'z' is complex128, which"),
        ({"l": np.ones(2, np.longdouble)}, [], "or cast it with --dtype"),
        ({"__metadata__": np.ones(1)}, [], "which may not be"),
        ({"x": np.ones(1)}, ["--rank", 0], "--rank is not for"),
        ({"m": {"a": {"tied_to": "b"}, "c": np.ones(1)}}, [], "which is no array"),
    ],
)
def test_export_refuses_what_cannot_be(tmp_path, capsys, tree, options, words):
    path = saved(tmp_path / "c", tree)

    status, _, err = export(capsys, path, tmp_path / "out", *options)

    assert (status, words in err) == (2, True), err
    assert names_in(tmp_path) == ["c"]


def test_export_refuses_what_is_another_on_each_rank(tmp_path, capsys):
    state = {"model": {"x": PerRank(np.ones(2))}}
    path = saved(tmp_path / "c", lambda rank: state, size=2)

    status, _, err = export(capsys, path, tmp_path / "out")

    assert (status, "'model/x' is another array on each rank" in err) == (2, True)


def test_export_of_npy_refuses_what_is_for_safetensors(tmp_path, capsys):
    path = saved(tmp_path / "c", {"x": np.ones(1)})

    status, _, err = run(capsys, "export", path, "x", "-o", "x.npy", "--dtype", "bf16")

    assert (status, "--dtype is not for --format npy" in err) == (2, True)


def test_export_casts_floats_and_nothing_else(tmp_path, capsys):
    path = saved(
        tmp_path / "c",
        {"w": np.array([1 / 3, -2e5, 7e4]), "n": np.array([5]), "m": np.ones(1, "?")},
    )

    status, _, err = export(capsys, path, tmp_path / "out", "--dtype", "fp16")

    found = read_back(tmp_path / "out")
    half = np.array([1 / 3, -np.inf, np.inf], "f2")
    assert status == 0
    assert "w: 2 elements are too large for fp16" in err
    assert found["w"] == ("F16", [3], half.tobytes())
    assert (found["n"][0], found["m"][0]) == ("I64", "BOOL")


def test_export_splits_as_the_hub_does(tmp_path, capsys):
    torch = pytest.importorskip("torch")
    hub = pytest.importorskip("huggingface_hub")
    sizes = {"a": 10, "b": 20, "c": 60, "d": 5, "e": 36}
    arrays = {name: RNG.random(n).astype("f4") for name, n in sizes.items()}
    path = saved(tmp_path / "c", {"model": arrays})
    (tmp_path / "hub").mkdir()
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    hub.save_torch_state_dict(tensors, tmp_path / "hub", max_shard_size=160)

    export(capsys, path, tmp_path / "out", "--max-shard", "160")

    theirs = json.loads((tmp_path / "hub" / INDEX).read_text())
    assert json.loads((tmp_path / "out" / INDEX).read_text()) == theirs
    for name in names_in(tmp_path / "hub"):
        if name != INDEX:
            ours = (tmp_path / "out" / name).read_bytes()
            assert ours == (tmp_path / "hub" / name).read_bytes()


@pytest.mark.parametrize("max_shard", ["5GB", "300"])
def test_hub_loads_a_model_with_tied_weights(tmp_path, capsys, max_shard):
    torch = pytest.importorskip("torch")
    hub = pytest.importorskip("huggingface_hub")

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(11, 6)
            self.norm = torch.nn.BatchNorm1d(6)
            self.head = torch.nn.Linear(6, 11, bias=False)
            self.head.weight = self.embed.weight

    model, loaded = Model().bfloat16(), Model().bfloat16()
    arrays = {}
    for name, tensor in model.state_dict().items():
        is_float = tensor.is_floating_point()
        raw = tensor.detach().view(torch.int16) if is_float else tensor
        arrays[name] = raw.numpy().view(BFLOAT16) if is_float else raw.numpy()
    arrays["head.weight"] = {"tied_to": "embed.weight"}
    path = saved(tmp_path / "c", {"model": arrays, "step": 1})

    export(capsys, path, tmp_path / "out", "--max-shard", max_shard)
    answer = hub.load_torch_model(loaded, tmp_path / "out")

    assert answer.missing_keys == ["head.weight"]
    assert not answer.unexpected_keys
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_safetensors_library_loads_a_model_with_tied_weights_strictly(tmp_path, capsys):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_model

    model, loaded = (torch.nn.ModuleList(2 * [torch.nn.Linear(3, 4)]) for _ in "ab")
    tree = {
        "0.weight": model[0].weight.detach().numpy(),
        "0.bias": model[0].bias.detach().numpy(),
        "1.weight": {"tied_to": "0.weight"},
        "1.bias": {"tied_to": "0.bias"},
    }
    path = saved(tmp_path / "c", {"model": tree})

    export(capsys, path, tmp_path / "out")
    missing, unexpected = load_model(loaded, tmp_path / "out/model.safetensors")

    assert (missing, unexpected) == (set(), [])
    assert torch.equal(loaded[1].weight, model[0].weight)


def test_export_of_a_tied_name_alone_stores_what_it_stands_for(tmp_path, capsys):
    array = np.arange(3.0)
    tree = {"embed": array, "head": {"tied_to": "embed"}, "lm": {"tied_to": "embed"}}
    path = saved(tmp_path / "c", {"model": tree})

    export(capsys, path, tmp_path / "out", "--keys", "model/head", "--keys", "model/lm")

    with safetensors.safe_open(tmp_path / "out/model.safetensors", "numpy") as file:
        assert list(file.keys()) == ["head"]
        assert file.metadata() == {"format": "pt", "lm": "head"}
        assert file.get_tensor("head").tobytes() == array.tobytes()


def test_export_replaces_a_model_only_when_told(tmp_path, capsys):
    path = saved(tmp_path / "c", {"a": np.ones(100), "b": np.ones(100)})
    out = tmp_path / "out"
    export(capsys, path, out, "--max-shard", "800")
    (out / "config.json").write_text("{}")

    status, _, err = export(capsys, path, out)
    replaced, _, _ = export(capsys, path, out, "--overwrite")

    assert (status, "--overwrite replaces it" in err, replaced) == (2, True, 0)
    assert names_in(out) == ["config.json", "model.safetensors"]
    assert len(read_back(out)) == 2


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_export_that_fails_while_publishing_leaves_no_index(
    tmp_path, capsys, monkeypatch, failing
):
    out = tmp_path / "out"
    old = saved(tmp_path / "old", {"a": np.zeros(100), "b": np.zeros(100)})
    new = saved(tmp_path / "new", {"a": np.ones(100), "b": np.ones(100)})
    export(capsys, old, out, "--max-shard", "800")
    rename, calls = staged_files.rename, []

    def rename_or_fail(source, target):
        calls.append(target.name)
        if len(calls) == failing:
            raise mpickpt.StorageError("no more", errno=5, path=str(source))
        rename(source, target)

    monkeypatch.setattr(staged_files, "rename", rename_or_fail)
    status, _, _ = export(capsys, new, out, "--max-shard", "800", "--overwrite")

    parts = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert status == 5
    assert calls == [*parts, INDEX][:failing]
    assert names_in(out) == parts


@pytest.mark.parametrize("size", [1, 3])
def test_export_of_damaged_bytes_leaves_nothing(tmp_path, capsys, size):
    rows = np.arange(12, dtype="f4").reshape(4, 3)
    whole = {"x": Replicated(np.arange(9.0)), "w": Sharded.block(rows[:1])}

    def state(rank):
        mine = {} if rank else {"w": Sharded.block(rows)}
        return {"model": whole | {"w": Sharded.block(rows[:0])} | mine}

    path = saved(tmp_path / "c", state, size)
    flip_byte_of_shard(path)

    status, _, err = export(capsys, path, tmp_path / "out", "--max-shard", "40")

    assert (status, "is damaged" in err) == (3, True)
    assert names_in(tmp_path) == ["c"]


def test_export_to_a_full_disk_leaves_nothing(tmp_path, capsys, small_disk):
    path = saved(tmp_path / "c", {"a": np.ones(1 << 18), "b": np.ones(1 << 19)})

    status, _, err = export(capsys, path, small_disk, "--max-shard", "2MiB")

    assert (status, "No space left" in err) == (5, True)
    assert names_in(small_disk) == []


def test_export_of_a_checkpoint_that_is_replaced_meanwhile_fails(
    tmp_path, capsys, monkeypatch
):
    # More than the blocks that the reader still has when the old shard is gone.
    ones = np.ones(3 << 20)
    path = saved(tmp_path / "c", {"a": ones, "b": ones})
    fill = export_safetensors._fill

    def fill_and_replace(*arguments):
        yield from fill(*arguments)
        saved(path, {"a": -ones, "b": -ones})

    monkeypatch.setattr(export_safetensors, "_fill", fill_and_replace)
    limit = str(ones.nbytes)
    status, _, err = export(capsys, path, tmp_path / "out", "--max-shard", limit)

    assert (status, "missing" in err) == (3, True)
    assert names_in(tmp_path) == ["c"]


def test_export_reads_from_a_store(tmp_path, capsys, monkeypatch):
    array = np.arange(5.0)
    saved(tmp_path / "run/c", {"model": {"x": array}})
    memory_store(monkeypatch).copy_in(tmp_path / "run", "run")

    status, _, _ = export(capsys, f"{URL}/run/c", tmp_path / "out")

    assert status == 0
    assert read_back(tmp_path / "out") == {"x": ("F64", [5], array.tobytes())}


def test_export_to_a_store_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        export(capsys, tmp_path, "s3://bucket/out")

    assert "write to a directory" in capsys.readouterr().err


def test_header_that_is_too_large_is_refused():
    shape = (1,) * 5
    name = "x" * 1000
    tensors = [
        Tensor(name=f"{name}{number}", dtype=np.dtype("f4"), shape=shape)
        for number in range(100_000)
    ]

    with pytest.raises(ValueError, match="choose smaller files"):
        plan_files(tensors, 10**9, {})


# What holds memory for long is a few blocks: of the reader, of the writer, of a cast.
MEMORY = """
import resource, sys
from mpickpt.cli.main import main
from mpickpt.interop.safetensors import export as export_safetensors
from pathlib import Path
peak = lambda: int(next(
    line for line in open("/proc/self/status") if line.startswith("VmHWM")
).split()[1])
begin = peak()
assert main(sys.argv[1:]) == 0
foreign = {"torch", "safetensors", "huggingface_hub", "mpi4py", "h5py"}
assert not foreign & set(sys.modules), foreign & set(sys.modules)
print((peak() - begin) >> 10)
"""


@pytest.mark.parametrize("options", [[], ["--dtype", "bf16"]], ids=" ".join)
def test_export_needs_little_memory_and_no_other_library(tmp_path, options):
    array = np.ones((1 << 10, 50 << 10), "f4")

    def state(rank):
        part = array[:, rank * 25600 : (rank + 1) * 25600]
        return {"w": Sharded(part, global_shape=array.shape, offset=(0, rank * 25600))}

    path = saved(tmp_path / "c", state, size=2)
    arguments = ["export", path, "--format", "safetensors", "-o", tmp_path / "out"]
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, *map(str, [*arguments, *options])],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) < 180

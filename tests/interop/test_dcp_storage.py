"""DCP's storage classes: its round trips, on one process and under mpiexec."""

import copy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpickpt
from mpickpt import PerRank, Replicated, Sharded
from mpickpt.format.naming import key_of
from mpickpt.format.tree import Plain, SavedLeaf
from tests.mpi_launch import finish, start

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
from torch.distributed.checkpoint._nested_dict import flatten_state_dict  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402
from torch.distributed.checkpoint.default_planner import (  # noqa: E402
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.state_dict import (  # noqa: E402
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import (  # noqa: E402
    _load_state_dict,
)

from mpickpt.interop.dcp_storage.tree import (  # noqa: E402
    METADATA_KEY,
    TENSOR,
    TORCH_SAVED,
    VALUE,
    Item,
    items_of,
    marks_of,
    tree_of,
)
from mpickpt.interop.dcp_storage.values import stored  # noqa: E402
from mpickpt.torch import DcpReader, DcpWriter  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
PROGRAM = str(Path(__file__).with_name("programs") / "dcp_storage.py")
TIMEOUT_S = 240


def run_cases(folder, *cases, size, rc=""):
    code = f"{rc}import runpy, sys; sys.argv = sys.argv[1:]; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    program = start(
        ["-m", "mpi4py", "-c", code, PROGRAM, str(folder), *cases],
        size=size,
        environ={"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    )
    outcome = finish(program, TIMEOUT_S)
    passed = [case for case in cases if f"{case} passed\n" in outcome.output]
    assert not outcome.timed_out, outcome.output[-10_000:]
    assert (outcome.returncode, passed) == (0, list(cases)), outcome.output[-10_000:]


def save(state, path, **how):
    dcp.save(state, storage_writer=DcpWriter(path, **how), no_dist=True)


def load(state, path, **how):
    dcp.load(state, storage_reader=DcpReader(path, **how), no_dist=True)
    return state


def cli(*arguments):
    command = [sys.executable, "-m", "mpickpt", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_two_ranks_save_and_load_as_with_dcp_s_own_storage(tmp_path):
    cases = ["values", "in_the_background", "planners", "errors", "damage"]
    cases.append("failing_planners")
    run_cases(tmp_path, *cases, size=2)


@pytest.mark.slow
@pytest.mark.timeout(4 * TIMEOUT_S)
def test_fsdp_state_is_loaded_on_more_ranks_and_on_fewer(tmp_path):
    run_cases(tmp_path, "fsdp_save", size=2)
    run_cases(tmp_path, "fsdp_load", "fsdp_save_again", "meshes", size=4)
    run_cases(tmp_path, "fsdp_load", "part_of_the_state", size=2)

    path = tmp_path / "run/step-0000000002"
    expected = torch.load(tmp_path / "fsdp.expected")
    assert "step-0000000002" in cli("ls", path.parent)
    assert "model/0.weight" in cli("show", path)
    cli("verify", path)
    cli("export", path, "model/0.weight", "-o", tmp_path / "w.npy")
    weight = expected["model"]["0.weight"].numpy()
    np.testing.assert_array_equal(np.load(tmp_path / "w.npy"), weight)
    with mpickpt.open_checkpoint(path) as checkpoint:
        assert checkpoint["step"] == 2
        found = checkpoint["optim", "state", "0.weight", "exp_avg"][...]
        moment = expected["optim"]["state"]["0.weight"]["exp_avg"].numpy()
        np.testing.assert_array_equal(found, moment)
    tree = mpickpt.load_sharded(path, reshard=True)
    assert tree["optim"]["param_groups"] == expected["optim"]["param_groups"]


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_saves_in_the_background_need_threads_in_mpi(tmp_path):
    rc = "import mpi4py; mpi4py.rc.thread_level = 'funneled'; "
    run_cases(tmp_path, "without_threads", size=2, rc=rc)


def test_one_process_needs_no_mpi(tmp_path):
    state = {"w": torch.arange(6.0), "n": {"lr": 0.1, "names": ["a", None]}}

    save(state, tmp_path / "c", step=5, metadata={"mine": 1}, metrics={"loss": 2.0})

    found = load({"w": torch.zeros(6), "n": {"lr": 0, "names": []}}, tmp_path / "c")
    assert torch.equal(found["w"], state["w"])
    assert found["n"] == state["n"]
    manifest = mpickpt.read_manifest(tmp_path / "c")
    assert (manifest.step, manifest.metadata["mine"]) == (5, 1)
    assert manifest.metrics == {"loss": 2.0}
    assert [array.key for array in manifest.arrays] == ["w"]


def test_checkpoint_id_replaces_the_path(tmp_path):
    writer, reader = DcpWriter(tmp_path / "no"), DcpReader(tmp_path / "no")
    state = {"w": torch.ones(2)}
    found = {"w": torch.zeros(2)}

    dcp.save(state, storage_writer=writer, checkpoint_id=tmp_path / "yes", no_dist=True)
    dcp.load(found, storage_reader=reader, checkpoint_id=tmp_path / "yes", no_dist=True)

    assert torch.equal(found["w"], state["w"])
    assert writer.result.path == tmp_path / "yes"
    assert not (tmp_path / "no").exists()
    assert not DcpWriter.validate_checkpoint_id("s3://bucket/run")


def test_step_is_that_of_the_path_unless_it_is_said(tmp_path):
    for name, how, step in (
        ("step-0000000012", {}, 12),
        ("step-0000000013", {"step": 7}, 7),
        ("other", {}, 0),
    ):
        save({"a": 1}, tmp_path / name, **how)
        assert mpickpt.read_manifest(tmp_path / name).step == step


def test_tensors_are_filled_in_place_whatever_their_strides(tmp_path):
    save({"w": torch.arange(12.0).view(3, 4)}, tmp_path / "c")
    wide = torch.zeros(4, 6)
    state = {"w": wide.T[1:4]}

    load(state, tmp_path / "c")

    assert torch.equal(wide[:, 1:4].T, torch.arange(12.0).view(3, 4))
    assert torch.equal(wide[:, 4:], torch.zeros(4, 2))


def test_whole_checkpoint_is_loaded_without_a_template(tmp_path):
    save({"a": {"w": torch.ones(2)}, "l": [{"n": 1}, (2, 3)]}, tmp_path / "c")
    state = {}

    _load_state_dict(
        state,
        storage_reader=DcpReader(tmp_path / "c"),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )

    assert torch.equal(state["a"].pop("w"), torch.ones(2))
    assert state == {"a": {}, "l": [{"n": 1}, (2, 3)]}


def test_checkpoint_of_save_sharded_is_read_under_dotted_names(tmp_path):
    weight = np.arange(6, dtype=np.float32).reshape(2, 3)
    tree = {
        "model": {
            "w": Sharded(weight, global_shape=(2, 3), offset=(0, 0)),
            "b": Replicated(np.ones(3)),
        },
        "times": Sharded.block(np.arange(3).astype("M8[s]")),
        "rng": PerRank(np.random.default_rng(1)),
        "step": 4,
    }
    mpickpt.save_sharded(tree, tmp_path / "c", step=4)
    model = {"w": torch.zeros(2, 3), "b": torch.zeros(3, dtype=torch.float64)}

    state = load({"model": model, "step": 0, "times": None}, tmp_path / "c")

    np.testing.assert_array_equal(state["model"]["w"].numpy(), weight)
    assert torch.equal(state["model"]["b"], torch.ones(3, dtype=torch.float64))
    assert state["step"] == 4
    np.testing.assert_array_equal(state["times"], np.arange(3).astype("M8[s]"))
    assert not any("rng" in name for name in DcpReader(tmp_path / "c")._items)


def test_adapted_objects_are_read_ties_and_optimizer_included(tmp_path):
    saved, found = Tied(1), Tied(2)
    for one in (saved, found):
        one.optimizer.step()
    adapted = mpickpt.torch.adapt({"model": saved.net, "optim": saved.optimizer})
    mpickpt.save_sharded(adapted, tmp_path / "c", step=0)

    optimizer = get_optimizer_state_dict(found.net, found.optimizer)
    load({"model": found.net.state_dict(), "optim": optimizer}, tmp_path / "c")

    for name, tensor in saved.net.state_dict().items():
        assert torch.equal(found.net.state_dict()[name], tensor), name
    expected = get_optimizer_state_dict(saved.net, saved.optimizer)["state"]
    assert optimizer["state"].keys() == expected.keys()
    for name, state in expected.items():
        assert torch.equal(optimizer["state"][name]["exp_avg"], state["exp_avg"])


def test_adapted_objects_are_filled_from_what_dcp_has_saved(tmp_path):
    saved, found = Tied(1), Tied(2)
    del saved.net.head, found.net.head
    saved.optimizer.step()
    optimizer = get_optimizer_state_dict(saved.net, saved.optimizer)
    save({"model": saved.net.state_dict(), "optim": optimizer}, tmp_path / "c")

    like = mpickpt.torch.adapt({"model": found.net, "optim": found.optimizer})
    mpickpt.load_sharded(tmp_path / "c", like=like)

    assert torch.equal(found.net.body.weight, saved.net.body.weight)
    moment = found.optimizer.state[found.net.body.weight]["exp_avg"]
    assert torch.equal(moment, saved.optimizer.state[saved.net.body.weight]["exp_avg"])


class Tied:
    """A model whose head is its embedding, and an optimizer that has gradients."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.net = torch.nn.Module()
        self.net.embed = torch.nn.Embedding(5, 3)
        self.net.body = torch.nn.Linear(3, 3)
        self.net.head = torch.nn.Linear(3, 5, bias=False)
        self.net.head.weight = self.net.embed.weight
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.1)
        for parameter in self.net.parameters():
            parameter.grad = torch.rand_like(parameter)


def test_names_that_collide_are_refused(tmp_path):
    mpickpt.save_sharded({"a.b": 1, "a": {"b": 2}}, tmp_path / "c", step=0)

    with pytest.raises(mpickpt.ManifestError, match="one name in DCP"):
        DcpReader(tmp_path / "c").read_metadata()


def test_checkpoint_that_was_replaced_meanwhile_is_not_mixed_up(tmp_path):
    save({"w": torch.ones(2)}, tmp_path / "c")
    reader = DcpReader(tmp_path / "c")
    metadata = reader.read_metadata()
    save({"w": torch.zeros(2)}, tmp_path / "c", overwrite=True)
    planner = dcp.DefaultLoadPlanner()
    planner.set_up_planner({"w": torch.zeros(2)}, metadata, True)
    plan = reader.prepare_global_plan([planner.create_local_plan()])[0]

    with pytest.raises(mpickpt.CheckpointError, match="replaced by another save"):
        reader.read_data(plan, planner)


class Trap:
    """Leaves a mark where it is unpickled by something that runs its code."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_values_that_would_run_code_are_refused_at_save_by_name(tmp_path):
    with pytest.raises(CheckpointException) as caught:
        save({"deep": {"trap": Trap(tmp_path / "sprung")}}, tmp_path / "c")

    (failure, _) = caught.value.failures[0]
    assert isinstance(failure, mpickpt.StateTypeError)
    assert failure.key == "deep/trap"
    assert not (tmp_path / "sprung").exists()
    assert not (tmp_path / "c" / "manifest.json").exists()


def test_forged_pickles_are_refused_at_load_by_name(tmp_path):
    torch.save(Trap(tmp_path / "sprung"), tmp_path / "trap.pt")
    content = np.fromfile(tmp_path / "trap.pt", np.uint8)
    mpickpt.save_sharded(
        {"trap": Sharded.block(content)},
        tmp_path / "c",
        step=0,
        metadata={METADATA_KEY: {"version": 1, "torch_saved": ["trap"]}},
    )

    with pytest.raises(CheckpointException) as caught:
        load({"trap": None}, tmp_path / "c")

    (failure, _) = caught.value.failures[0]
    assert isinstance(failure, mpickpt.ManifestError)
    assert "'trap'" in str(failure)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    "document", [{"version": 2}, {"version": 1, "whole": 3}, [], {"version": "1"}]
)
def test_unknown_marks_are_refused(tmp_path, document):
    metadata = {METADATA_KEY: document}
    mpickpt.save_sharded({"a": 1}, tmp_path / "c", step=0, metadata=metadata)

    with pytest.raises(mpickpt.ManifestError, match=METADATA_KEY):
        DcpReader(tmp_path / "c").read_metadata()


def test_classes_that_the_program_allows_are_kept(tmp_path):
    state = {"path": Path("/tmp/x"), "w": torch.ones(1)}
    with pytest.raises(CheckpointException, match="add_safe_globals"):
        save(state, tmp_path / "c")

    with torch.serialization.safe_globals([type(state["path"])]):
        save(state, tmp_path / "c")
        found = load({"path": None}, tmp_path / "c")

    assert found["path"] == state["path"]


def test_saves_that_dcp_makes_without_collectives_are_refused(tmp_path):
    writer = DcpWriter(tmp_path / "c")

    with pytest.raises(mpickpt.CallMismatchError, match="use_collectives"):
        writer.set_up_storage_writer(True, rank=0, use_collectives=False)


def test_writer_cannot_go_to_another_process(tmp_path):
    with pytest.raises(mpickpt.StateTypeError, match="THREAD"):
        copy.copy(DcpWriter(tmp_path / "c"))


TENSOR_MARK = object()
PLAIN = st.none() | st.booleans() | st.integers() | st.text(max_size=3)
VALUES = st.recursive(
    PLAIN | st.just(TENSOR_MARK),
    lambda below: (
        st.lists(below, max_size=3)
        | st.lists(below, max_size=2).map(tuple)
        | st.dictionaries(st.text("ab.0/%", max_size=2), below, max_size=3)
    ),
    max_leaves=12,
)


def without_tensors(value):
    if value is TENSOR_MARK:
        return "no tensor"
    if isinstance(value, tuple | list):
        return type(value)(map(without_tensors, value))
    if isinstance(value, dict):
        return {key: without_tensors(child) for key, child in value.items()}
    return value


@settings(deadline=None)
@given(state=st.dictionaries(st.text("ab.0", max_size=2), VALUES, max_size=4))
def test_items_are_found_again_as_dcp_has_flattened_them(state):
    try:
        flat, paths = flatten_state_dict(_with_tensors(state))
    except ValueError:
        return  # two entries of one name: DCP refuses them itself
    items = [_item(paths[name], value) for name, value in flat.items()]

    tree = tree_of(items)
    found = {item.path: item for item in items_of(tree, marks_of(tree, items))}

    assert found.keys() == {item.path for item in items}
    assert all(found[item.path].kind == item.kind for item in items)


def _with_tensors(value):
    if value is TENSOR_MARK:
        return torch.zeros(1)
    if isinstance(value, dict):
        return {key: _with_tensors(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_with_tensors(child) for child in value]
    return without_tensors(value)


def _item(path, value):
    key = key_of(path)
    if isinstance(value, torch.Tensor):
        return Item(path, TENSOR, SavedLeaf(key, "sharded", "float32", (1,)))
    return Item(path, VALUE, stored(value, key).node)


def test_marks_tell_apart_what_the_tree_alone_does_not():
    leaf = SavedLeaf("x/0", "sharded", "uint8", (3,))
    items = [
        Item(("x", 0), TORCH_SAVED, leaf),
        Item(("hole", 1), VALUE, Plain(5)),
        Item(("whole",), VALUE, tree_of([Item(("k",), VALUE, Plain(1))])),
    ]
    tree = tree_of(items)

    marks = marks_of(tree, items)

    assert marks.document() == {
        "version": 1,
        "whole": ["whole"],
        "split": ["hole"],
        "holes": ["hole/0"],
        "torch_saved": ["x/0"],
    }
    assert sorted(items_of(tree, marks), key=str) == sorted(items, key=str)


def test_items_inside_other_items_are_refused():
    outer = Item(("a",), VALUE, Plain(1))
    inner = Item(("a", "b"), VALUE, Plain(2))

    for items in ([outer, inner], [inner, outer]):
        with pytest.raises(mpickpt.StateTypeError, match="'a"):
            tree_of(items)

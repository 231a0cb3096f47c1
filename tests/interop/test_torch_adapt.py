"""Whole states of torch programs: generators, loaders, wrappers, a manager's run."""

import random
import subprocess
import sys
from collections import namedtuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import mpickpt  # noqa: E402
import mpickpt.torch  # noqa: E402
from mpickpt import (  # noqa: E402
    CheckpointManager,
    EverySteps,
    PerRank,
    Replicated,
    Sharded,
    StateTypeError,
    load_sharded,
    save_sharded,
    save_sharded_async,
)
from tests.ranks_as_threads import run_ranks  # noqa: E402

Pair = namedtuple("Pair", "left right")


def save(path, state):
    save_sharded(mpickpt.torch.adapt(state), path, step=0)
    return path


def load(path, state, **options):
    return load_sharded(path, like=mpickpt.torch.adapt(state), **options)


def draws():
    return (
        torch.rand(3).tolist(),
        random.random(),
        np.random.rand(2).tolist(),
        np.random.standard_normal(),
    )


def test_random_state_holds_all_global_generators(tmp_path):
    np.random.standard_normal()  # its second value waits in the generator
    state = {"rng": mpickpt.torch.RandomState()}
    path = save(tmp_path / "c", state)
    wanted = draws()

    load(path, state)

    assert draws() == wanted


@pytest.mark.parametrize("wrap", [lambda g: g, lambda g: PerRank(g, on_resize="keep")])
def test_generator_goes_on_where_it_was(tmp_path, wrap):
    generator = torch.Generator().manual_seed(3)
    state = {"g": wrap(generator)}
    path = save(tmp_path / "c", state)
    wanted = torch.rand(3, generator=generator)

    load(path, state)

    assert torch.equal(torch.rand(3, generator=generator), wanted)


def test_random_state_refuses_an_unknown_rule():
    with pytest.raises(ValueError, match="RandomState on_resize 'twice'"):
        mpickpt.torch.RandomState(on_resize="twice")


def test_random_state_follows_its_rule_on_another_number_of_ranks(tmp_path):
    def rng(rule):
        return mpickpt.torch.adapt({"rng": mpickpt.torch.RandomState(on_resize=rule)})

    run_ranks(
        2, lambda comm: save_sharded(rng("keep"), tmp_path / "c", step=0, comm=comm)
    )
    torch.rand(1)
    wanted = torch.get_rng_state()

    load_sharded(tmp_path / "c", like=rng("keep"), reshard=True)

    assert torch.equal(torch.get_rng_state(), wanted)


class Loader:
    """A stateful data loader: plain values, tensors, and numpy's arrays."""

    def __init__(self, position):
        self.position = position
        self.order = torch.randperm(5)
        self.seen = np.arange(3)
        self.nested = [{"t": torch.tensor(2.5, dtype=torch.bfloat16)}, (1, None)]

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)


def test_state_of_a_loader_comes_back_with_its_own_types(tmp_path):
    loader, other = Loader(7), Loader(0)
    path = save(tmp_path / "c", {"loader": PerRank(loader, on_resize="keep")})

    load(path, {"loader": PerRank(other, on_resize="keep")})

    assert other.position == 7
    assert torch.equal(other.order, loader.order)
    assert isinstance(other.seen, np.ndarray) and (other.seen == loader.seen).all()
    assert other.nested[0]["t"].dtype == torch.bfloat16 and other.nested[0]["t"] == 2.5
    assert other.nested[1] == (1, None)


def test_scaler_comes_back(tmp_path):
    scaler, other = (torch.amp.GradScaler("cpu", init_scale=s) for s in (8.0, 2.0))
    path = save(tmp_path / "c", {"scaler": scaler})

    load(path, {"scaler": other})

    assert other.get_scale() == 8.0


def test_tensors_in_every_wrapper_are_filled_in_place(tmp_path):
    tensors = [torch.randn(4, 2).requires_grad_() for _ in range(6)]
    wanted = [tensor.detach().clone() for tensor in tensors]
    a, b, c, d, e, f = tensors
    state = {
        "block": Sharded.block(a),
        "box": Sharded(b, global_shape=(4, 2), offset=(0, 0)),
        "pieces": Sharded.pieces(
            [((0, 0), c), ((4, 0), d)], global_shape=(8, 2), dtype=torch.float32
        ),
        "pair": Pair(Replicated([e]), {"deep": PerRank({"f": f})}),
        "plain": [1, "two", None, (3.0,)],
    }
    path = save(tmp_path / "c", state)
    with torch.no_grad():
        for tensor in tensors:
            tensor.zero_()

    loaded = load(path, state)

    assert all(map(torch.equal, tensors, wanted))
    assert isinstance(loaded["pair"], Pair) and loaded["plain"] == state["plain"]


def test_bare_tensor_on_several_ranks_is_refused_by_name(tmp_path):
    state = mpickpt.torch.adapt({"w": torch.ones(2)})

    def refused(comm):
        with pytest.raises(StateTypeError, match="'w' is a bare array"):
            save_sharded(state, tmp_path / "c", step=0, comm=comm)

    run_ranks(2, refused)


def test_tree_is_left_as_it_was():
    model = torch.nn.Linear(2, 2)
    tree = {"model": model, "list": [torch.ones(2)]}

    mpickpt.torch.adapt(tree)

    assert tree["model"] is model and torch.is_tensor(tree["list"][0])


def test_adapting_twice_changes_nothing_more():
    once = mpickpt.torch.adapt({"model": torch.nn.Linear(2, 2), "x": 1})

    again = mpickpt.torch.adapt(once)

    assert again["model"] is once["model"]


def test_asynchronous_save_has_its_own_copy(tmp_path):
    model = torch.nn.Linear(3, 3)
    wanted = model.weight.detach().clone()
    pending = save_sharded_async(
        mpickpt.torch.adapt({"model": model}), tmp_path / "c", step=0
    )
    with torch.no_grad():
        model.weight.zero_()
    pending.result()

    load(tmp_path / "c", {"model": model})

    assert torch.equal(model.weight, wanted)


@pytest.mark.parametrize("once", [True, False])
def test_manager_resumes_to_the_same_bits(tmp_path, once):
    def run(folder, stop):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        tree = {
            "model": model,
            "optimizer": optimizer,
            "schedule": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
            "rng": mpickpt.torch.RandomState(),
        }
        adapted = mpickpt.torch.adapt(tree)

        def state():
            return adapted if once else mpickpt.torch.adapt(tree)

        with CheckpointManager(tmp_path / folder, state=state, when=EverySteps(2)) as m:
            m.restore_latest()
            for step in range(m.next_step, stop):
                model(torch.randn(4, 3)).pow(2).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                tree["schedule"].step()
                m.save_if_due(step)
        return model.state_dict()

    wanted = run("whole", 8)
    run("broken", 5)

    got = run("broken", 8)

    assert all(torch.equal(wanted[key], got[key]) for key in wanted)


def test_missing_torch_is_said_with_what_to_install():
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import mpickpt\n"
        "try:\n"
        "    import mpickpt.torch\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert "pip install 'mpickpt[torch]'" in run.stdout


def test_core_does_not_import_torch(tmp_path):
    program = (
        "import sys, numpy, mpickpt\n"
        "tree = {'x': numpy.ones(2)}\n"
        f"mpickpt.save_sharded(tree, {str(tmp_path / 'c')!r}, step=0)\n"
        f"mpickpt.load_sharded({str(tmp_path / 'c')!r}, like=tree)\n"
        "print('torch' in sys.modules)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert run.stdout.strip() == "False"


def test_public_names_are_documented():
    for name in mpickpt.torch.__all__:
        assert getattr(mpickpt.torch, name).__doc__

"""Copies from a device: begun together, waited for once; here with a double of one.

The double's copies happen only when it is waited for, as a stream's may.
"""

import pytest

torch = pytest.importorskip("torch")

from mpickpt import (  # noqa: E402
    LayoutError,
    Replicated,
    StateTypeError,
    load_sharded,
    save_sharded,
)
from mpickpt.interop.torch.foreign import PiecesState, TensorState  # noqa: E402
from mpickpt.interop.torch.module import ModuleState  # noqa: E402
from mpickpt.interop.torch.optimizer import OptimizerState  # noqa: E402
from mpickpt.interop.torch.staging import Moves, PlainCopier  # noqa: E402
from mpickpt.state import Sharded  # noqa: E402


class DeviceDouble:
    """Stands for a device whose memory the host cannot see."""

    def __init__(self):
        self.calls = []
        self.waiting = []

    def allocate(self, nbytes):
        self.calls.append("allocate")
        return torch.full((nbytes,), 0xEE, dtype=torch.uint8)

    def begin(self):
        self.calls.append("begin")

    def copy(self, target, source):
        self.calls.append("copy")
        self.waiting.append((target, source))

    def finish(self):
        self.calls.append("finish")
        for target, source in self.waiting:
            target.copy_(source)
        self.waiting.clear()


@pytest.fixture
def device():
    return DeviceDouble()


@pytest.fixture
def moves(device):
    return lambda: Moves(lambda _: device)


def trained(moves, seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5))
    model[0].weight.data = model[0].weight.data.bfloat16().float()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2 if seed == 1 else 0):
        model(torch.randn(4, 3)).pow(2).sum().backward()
        optimizer.step()
    state = {
        "model": ModuleState(model, "model", Replicated, Replicated, moves),
        "optimizer": OptimizerState(optimizer, "", {"model": model}, Replicated, moves),
    }
    return model, optimizer, state


def tensors_of(model, optimizer):
    found = list(model.state_dict().values())
    for parameter in model.parameters():
        found += optimizer.state[parameter].values()
    return found


def test_state_on_a_device_comes_back_bit_for_bit(tmp_path, moves):
    model, optimizer, state = trained(moves, 1)
    other, fresh, like = trained(moves, 2)
    save_sharded(state, tmp_path / "c", step=0)

    load_sharded(tmp_path / "c", like=like)

    wanted, got = tensors_of(model, optimizer), tensors_of(other, fresh)
    assert len(wanted) == len(got) == 7 + 4 * 3
    assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))


def test_all_copies_of_a_module_are_waited_for_once(device, moves):
    _, _, state = trained(moves, 1)
    device.calls.clear()

    state["model"].state_dict()

    assert device.calls.count("copy") == 7
    assert device.calls.count("begin") == device.calls.count("finish") == 1
    assert device.calls[-1] == "finish"


def test_small_tensors_share_one_allocation_and_large_ones_have_their_own(device):
    moves = Moves(lambda _: device)
    small = [torch.rand(10 + n) for n in range(50)]
    large = torch.rand(5 << 20)

    arrays = [moves.array_of(tensor, "x") for tensor in [*small, large]]
    moves.finish()

    assert device.calls.count("allocate") == 2
    pairs = zip(arrays, [*small, large], strict=True)
    assert all((array == tensor.numpy()).all() for array, tensor in pairs)
    assert all(a.__array_interface__["data"][0] % 4 == 0 for a in arrays)


def test_copies_are_waited_for_after_an_error_too(device, moves):
    model = torch.nn.Linear(2, 2)
    model.bias = None
    model.refused = torch.nn.Parameter(torch.eye(2).to_sparse())
    state = ModuleState(model, "model", Replicated, Replicated, moves)

    with pytest.raises(StateTypeError, match="model/refused"):
        state.state_dict()

    assert device.calls[-2:] == ["copy", "finish"] and not device.waiting


def test_template_of_a_device_copies_nothing_from_it(device, moves):
    _, _, state = trained(moves, 1)
    device.calls.clear()

    state["model"].state_dict_template()

    assert "copy" not in device.calls


def test_what_is_not_loaded_stays_as_it_was_on_the_device(tmp_path, moves):
    _, _, state = trained(moves, 1)
    save_sharded(state, tmp_path / "c", step=0)
    model, _, like = trained(moves, 2)
    before = model[0].weight.detach().clone()

    load_sharded(tmp_path / "c", like=like, only=["model/1.*"])

    assert torch.equal(model[0].weight, before)
    assert model[1].num_batches_tracked == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2, torch.bool])
def test_tensors_and_pieces_of_a_tree_go_there_and_back(tmp_path, moves, dtype):
    one = torch.tensor([[1, 0], [1, 1]]).to(dtype)
    two = torch.tensor([1, 0, 0, 1]).to(dtype)
    row = torch.tensor([0, 1]).to(dtype)

    def state():
        pieces = Sharded.pieces([((0,), two[:1]), ((1,), two[1:])], global_shape=(4,))
        return {
            "one": Replicated(TensorState(one, "one", moves)),
            "two": PiecesState(pieces, "two", moves),
            "row": Sharded(TensorState(row, "row", moves), (2,), (0,)),
        }

    save_sharded(state(), tmp_path / "c", step=0)
    wanted = [tensor.float().tolist() for tensor in (one, two, row)]
    for tensor in (one, two, row):
        tensor.zero_()

    load_sharded(tmp_path / "c", like=state())

    assert [tensor.float().tolist() for tensor in (one, two, row)] == wanted


def test_shape_that_differs_is_named():
    with pytest.raises(LayoutError, match=r"'w' was saved with shape \(3,\)"):
        Moves().put(torch.ones(2), torch.ones(3).numpy(), "w")


def test_device_without_streams_copies_at_once():
    copier = PlainCopier()
    target = torch.zeros(3)

    copier.begin()
    copier.copy(target, torch.ones(3))

    assert target.tolist() == [1, 1, 1]
    copier.finish()

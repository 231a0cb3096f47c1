"""Modules in a state tree: names, ties, buffers, extra state, what does not fit."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import mpickpt.torch  # noqa: E402
from mpickpt import (  # noqa: E402
    LayoutError,
    StateTypeError,
    load_sharded,
    open_checkpoint,
    save_sharded,
)


class Tied(nn.Module):
    def __init__(self, seed, tie=True):
        torch.manual_seed(seed)
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 7, bias=False)
        self.register_buffer("cache", torch.rand(2), persistent=False)
        if tie:
            self.head.weight = self.embed.weight


def save(module, path, **options):
    tree = mpickpt.torch.adapt({"model": module}, **options)
    save_sharded(tree, path, step=0)
    return path


def load(module, path, **options):
    tree = mpickpt.torch.adapt({"model": module})
    return load_sharded(path, like=tree, **options)


def same(one, other):
    theirs = other.state_dict()
    return all(torch.equal(v, theirs[k]) for k, v in one.state_dict().items())


def test_parameters_and_buffers_are_filled_in_place(tmp_path):
    module, other = Tied(1), Tied(2)
    weight, address = other.embed.weight, other.embed.weight.data_ptr()

    load(other, save(module, tmp_path / "c"))

    assert same(module, other)
    assert other.embed.weight is weight and weight.data_ptr() == address
    assert weight.requires_grad


def test_tied_parameter_is_stored_once_and_stays_tied(tmp_path):
    module, other = Tied(1), Tied(2)

    load(other, save(module, tmp_path / "c"))

    assert other.head.weight is other.embed.weight
    with open_checkpoint(tmp_path / "c") as checkpoint:
        assert checkpoint.load("model")["head.weight"] == {"tied_to": "embed.weight"}
        assert checkpoint["model/embed.weight"].shape == (7, 3)


def test_parameters_that_share_storage_are_tied_too(tmp_path):
    module = Tied(1, tie=False)
    module.head.weight = nn.Parameter(module.embed.weight.data)

    save(module, tmp_path / "c")

    with open_checkpoint(tmp_path / "c") as checkpoint:
        assert checkpoint.load("model")["head.weight"] == {"tied_to": "embed.weight"}


@pytest.mark.parametrize("saved_tied", [True, False])
def test_ties_that_differ_are_an_error_that_names_both(tmp_path, saved_tied):
    path = save(Tied(1, tie=saved_tied), tmp_path / "c")

    with pytest.raises(LayoutError, match=r"'model/head.weight'.*embed\.weight"):
        load(Tied(2, tie=not saved_tied), path)


def test_tie_to_another_parameter_is_an_error_that_names_both(tmp_path):
    module, other = (nn.ParameterDict() for _ in range(2))
    for one in (module, other):
        one["a"], one["b"] = (nn.Parameter(torch.rand(2)) for _ in range(2))
    module["c"], other["c"] = module["a"], other["b"]
    path = save(module, tmp_path / "c")

    with pytest.raises(
        LayoutError, match=r"'model/c' was saved as tied to 'a', .* to 'b'"
    ):
        load(other, path)


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda m: torch.compile(m, backend="eager"), id="compile"),
        pytest.param(nn.DataParallel, id="DataParallel"),
    ],
)
def test_names_are_those_without_wrappers(tmp_path, wrap):
    module, other = Tied(1), Tied(2)
    path = save(wrap(module), tmp_path / "c")

    load(other, path)
    load(wrap(Tied(3)), path)

    assert same(module, other)


def test_wrappers_inside_a_module_are_taken_out_of_names(tmp_path):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        checkpoint_wrapper,
    )

    module, other = (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in "ab")
    module[0] = checkpoint_wrapper(module[0])
    module[1] = torch.compile(module[1], backend="eager")
    path = save(module, tmp_path / "c")

    load(other, path)

    assert torch.equal(other[0].weight, module[0].weight)
    assert torch.equal(other[1].weight, module[1]._orig_mod.weight)


def test_attribute_called_module_is_no_wrapper(tmp_path):
    module = nn.ModuleDict({"module": nn.Linear(2, 2)})

    save(module, tmp_path / "c")

    with open_checkpoint(tmp_path / "c") as checkpoint:
        assert "model/module.weight" in checkpoint.keys()  # noqa: SIM118


class WithExtra(nn.Module):
    def __init__(self, scale, steps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.extra = {"scale": scale, "history": torch.arange(steps), "n": [steps]}

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def test_extra_state_is_given_to_its_module_with_its_tensors(tmp_path):
    path = save(WithExtra(0.5, 3), tmp_path / "c")
    other = WithExtra(1.0, 1)

    load(other, path)

    assert other.extra["scale"] == 0.5 and other.extra["n"] == [3]
    assert torch.equal(other.extra["history"], torch.arange(3))


def test_extra_state_that_cannot_be_saved_is_refused_by_name(tmp_path):
    module = WithExtra(object(), 1)

    with pytest.raises(StateTypeError, match="model/_extra_state/scale"):
        save(module, tmp_path / "c")


def test_what_a_hook_puts_into_the_state_dict_goes_through_the_module(tmp_path):
    def double(module, state, prefix, metadata):
        state["weight"] = state["weight"] * 2

    def halve(module, state, prefix, *_):
        state["weight"] = state["weight"] / 2

    module, other = (nn.Linear(2, 2, bias=False) for _ in "ab")
    for one in (module, other):
        one.register_state_dict_post_hook(double)
        one.register_load_state_dict_pre_hook(halve)

    load(other, save(module, tmp_path / "c"))

    assert torch.equal(module.weight, other.weight)
    with open_checkpoint(tmp_path / "c") as checkpoint:
        assert np.array_equal(
            checkpoint["model/weight"][:], module.weight.detach().numpy() * 2
        )


def test_missing_and_unexpected_parameters_are_errors_or_left_alone(tmp_path):
    module = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    other = nn.ModuleDict({"a": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    path = save(module, tmp_path / "c")
    kept = other["c"].weight.detach().clone()

    with pytest.raises(LayoutError, match=r"model/c\.weight"):
        load(other, path)
    with pytest.raises(LayoutError, match=r"model/b\.weight"):
        load(other, path, missing="keep")
    load(other, path, missing="keep", unexpected="ignore")

    assert torch.equal(other["a"].weight, module["a"].weight)
    assert torch.equal(other["c"].weight, kept)


def test_only_some_parameters_are_loaded(tmp_path):
    module, other = (nn.ModuleDict({"a": nn.Linear(2, 2)}) for _ in "ab")
    bias = other["a"].bias.detach().clone()

    load(other, save(module, tmp_path / "c"), only=["model/a.weight"])

    assert torch.equal(other["a"].weight, module["a"].weight)
    assert torch.equal(other["a"].bias, bias)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (nn.Linear(3, 2), r"'model/weight' was saved with the global shape \(2, 2\)"),
        (nn.Linear(2, 2).double(), "'model/weight' was saved as float32"),
    ],
    ids=["shape", "dtype"],
)
def test_other_shape_or_dtype_is_an_error_that_names_the_parameter(
    tmp_path, other, words
):
    path = save(nn.Linear(2, 2), tmp_path / "c")

    with pytest.raises(LayoutError, match=words):
        load(other, path)


def test_cast_converts_into_the_module(tmp_path):
    module, other = nn.Linear(2, 2), nn.Linear(2, 2).bfloat16()

    load(other, save(module, tmp_path / "c"), cast=True)

    assert torch.equal(other.weight, module.weight.bfloat16())


def test_module_on_the_meta_device_is_refused_by_name(tmp_path):
    with torch.device("meta"):
        module = nn.Linear(2, 2)

    with pytest.raises(
        StateTypeError, match="'model/weight' is a tensor on the meta device"
    ):
        save(module, tmp_path / "c")


def test_lazy_module_is_refused_by_name(tmp_path):
    with pytest.raises(
        StateTypeError, match="'model/weight' is an UninitializedParameter"
    ):
        save(nn.LazyLinear(2), tmp_path / "c")


def test_module_without_tensors_is_saved_and_loaded(tmp_path):
    load(nn.ReLU(), save(nn.ReLU(), tmp_path / "c"))


def test_plain_dict_of_the_same_names_is_loaded_into_a_module(tmp_path):
    other = nn.Linear(2, 2)
    weight = np.arange(4, dtype=np.float32).reshape(2, 2)
    tree = {"model": {"weight": weight, "bias": np.ones(2, np.float32)}}
    save_sharded(tree, tmp_path / "c", step=0)

    load(other, tmp_path / "c")

    assert other.weight.tolist() == weight.tolist()


def test_module_inside_a_wrapper_takes_its_meaning(tmp_path):
    module, other = nn.Linear(2, 2), nn.Linear(2, 2)
    save_sharded(
        mpickpt.torch.adapt({"m": mpickpt.PerRank(module)}), tmp_path / "c", step=0
    )

    like = {"m": mpickpt.PerRank(other, on_resize="first")}
    load_sharded(tmp_path / "c", like=mpickpt.torch.adapt(like))

    assert same(module, other)
    with open_checkpoint(tmp_path / "c") as checkpoint:
        assert len(checkpoint.per_rank("m")) == 1


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({}, {"replicated"}),
        ({"plain": "per_rank"}, {"per_rank"}),
        ({"buffers": "per_rank"}, {"replicated", "per_rank"}),
    ],
)
def test_caller_says_whose_plain_tensors_are(tmp_path, options, kinds):
    path = save(nn.BatchNorm1d(3), tmp_path / "c", **options)

    records = mpickpt.read_manifest(path).arrays
    assert {record.kind for record in records} == kinds


@pytest.mark.parametrize("options", [{"plain": "mine"}, {"buffers": "mine"}])
def test_unknown_choice_is_refused(options):
    with pytest.raises(ValueError, match="'mine'; expected one of"):
        mpickpt.torch.adapt({}, **options)

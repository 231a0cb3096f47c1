"""Tensors as arrays: the same bytes in the same memory, or refused by name."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
ml_dtypes = pytest.importorskip("ml_dtypes")

import mpickpt.torch  # noqa: E402
from mpickpt import StateTypeError, load_sharded, save_sharded  # noqa: E402
from mpickpt.interop.torch.tensors import array_of, tensor_of  # noqa: E402

DTYPES = [
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128", "bfloat16"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    "float8_e8m0fnu",
]
SHAPES = [(), (0,), (3, 0, 2), (5,), (3, 4)]


def random_tensor(name, shape):
    generator = torch.Generator().manual_seed(1)
    dtype = getattr(torch, name)
    size = torch.empty(0, dtype=dtype).element_size()
    n = int(np.prod(shape)) * size
    high = 2 if name == "bool" else 256
    content = torch.randint(0, high, (n,), generator=generator, dtype=torch.uint8)
    return content.view(dtype).reshape(shape)


def bytes_of(tensor):
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_comes_back_from_a_checkpoint_bit_for_bit(tmp_path, name):
    tensors = {str(shape): random_tensor(name, shape) for shape in SHAPES}
    wanted = {key: bytes_of(tensor) for key, tensor in tensors.items()}
    state = mpickpt.Replicated(tensors)
    save_sharded(mpickpt.torch.adapt(state), tmp_path / "c", step=0)
    for tensor in tensors.values():
        tensor.copy_(torch.zeros(tensor.shape, dtype=tensor.dtype))

    load_sharded(tmp_path / "c", like=mpickpt.torch.adapt(state))

    assert {key: bytes_of(tensor) for key, tensor in tensors.items()} == wanted


@pytest.mark.parametrize("name", DTYPES)
def test_array_shares_its_memory_with_the_tensor(name):
    tensor = random_tensor(name, (3, 4))

    array = array_of(tensor, "x")

    assert array.__array_interface__["data"][0] == tensor.data_ptr()
    assert array.dtype.name == name
    assert tensor_of(array).data_ptr() == tensor.data_ptr()
    assert tensor_of(array).dtype == tensor.dtype


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda t: t.t(), id="transposed"),
        pytest.param(lambda t: t[::2, 1::3], id="strided"),
        pytest.param(lambda t: t[2], id="row"),
        pytest.param(lambda t: t[1, 2], id="element"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_views_are_saved_and_filled_in_place(tmp_path, view, dtype):
    base = torch.arange(42.0).reshape(6, 7).to(dtype)
    wanted = base.clone()
    state = {"x": mpickpt.Replicated(view(base))}
    save_sharded(mpickpt.torch.adapt(state), tmp_path / "c", step=0)
    view(base).zero_()

    load_sharded(tmp_path / "c", like=mpickpt.torch.adapt(state))

    assert torch.equal(base, wanted)


def test_parameters_that_require_gradients_are_filled_in_place(tmp_path):
    parameter = torch.nn.Parameter(torch.randn(4))
    leaf = parameter * 1  # has a graph behind it
    state = {"p": mpickpt.Replicated(parameter), "l": mpickpt.PerRank(leaf)}
    wanted = parameter.detach().clone()
    save_sharded(mpickpt.torch.adapt(state), tmp_path / "c", step=0)
    with torch.no_grad():
        parameter.zero_()

    load_sharded(tmp_path / "c", like=mpickpt.torch.adapt(state))

    assert torch.equal(parameter, wanted) and parameter.requires_grad


def test_lazily_conjugated_and_expanded_tensors_are_saved_but_not_filled():
    conjugated = torch.tensor([1 + 2j]).conj()
    expanded = torch.arange(3.0).expand(2, 3)

    assert array_of(conjugated, "x")[0] == 1 - 2j
    assert array_of(expanded, "x").tolist() == [[0, 1, 2], [0, 1, 2]]
    assert not array_of(conjugated, "x").flags.writeable
    assert not array_of(expanded, "x").flags.writeable


def quantized():
    return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


class Own(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.empty(3, device="meta"), "meta device"),
        (lambda: torch.eye(2).to_sparse(), "sparse_coo"),
        (lambda: torch.eye(2).to_sparse_csr(), "sparse_csr"),
        (quantized, "quantized"),
        (lambda: torch.ones(3).as_subclass(Own), "Own"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)]), "nested"),
        (lambda: torch.ones(2, dtype=torch.complex32), "complex32"),
        (lambda: torch.nn.LazyLinear(3).weight, "no shape yet"),
    ],
    ids=["meta", "coo", "csr", "quantized", "subclass", "nested", "complex32", "lazy"],
)
def test_tensors_without_elements_of_their_own_are_refused_by_name(make, words):
    state = {"layer": {"w": mpickpt.Replicated(make())}}

    with pytest.raises(StateTypeError, match=words) as caught:
        mpickpt.torch.adapt(state)

    assert caught.value.key == "layer/w"


def test_missing_ml_dtypes_is_said_with_what_to_install(monkeypatch):
    from mpickpt.interop.torch import tensors as torch_tensors

    torch_tensors._numpy_dtype.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)

    with pytest.raises(StateTypeError, match=r"mpickpt\[torch\]"):
        array_of(torch.ones(2, dtype=torch.bfloat16), "x")

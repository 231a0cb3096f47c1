"""The unpickler that runs nothing: what it reads, and what it refuses."""

import collections
import io
import os
import pickle  # noqa: TID251  to make what is to be read, and to refuse
import struct
import time
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpickpt import ManifestError
from mpickpt.interop.deepspeed.pickles import DEEPSPEED, PlainValues
from mpickpt.interop.sources.allowlist import STANDARD
from mpickpt.interop.sources.plain_objects import PLAIN_OBJECTS, NodeMaker
from mpickpt.interop.sources.restricted_unpickler import loads
from mpickpt.interop.sources.stubs import Opaque, Stub, StubTensor

PROTOCOLS = (2, 3, 4, 5)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**200), 2**200),
    st.floats(allow_nan=False),
    st.text(max_size=8),
    st.binary(max_size=8),
    st.complex_numbers(allow_nan=False),
)
KEYS = st.one_of(st.text(max_size=4), st.integers(-(2**40), 2**40))
TREES = st.recursive(
    SCALARS,
    lambda child: st.one_of(
        st.lists(child, max_size=4),
        st.dictionaries(KEYS, child, max_size=4),
        st.tuples(child, child),
    ),
    max_leaves=20,
)


def read(pickled, **how):
    return loads(pickled, **{"allow": STANDARD, "where": "file.pt", **how})


def refusal(pickled, **how):
    with pytest.raises(ManifestError) as caught:
        read(pickled, **how)
    return str(caught.value)


class Payload:
    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@given(tree=TREES, protocol=st.sampled_from(PROTOCOLS))
def test_plain_values_come_back_as_they_were(tree, protocol):
    assert repr(read(pickle.dumps(tree, protocol))) == repr(tree)


@given(tree=TREES, position=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_damaged_pickle_is_our_error_or_a_value(tree, position, bit):
    content = bytearray(pickle.dumps(tree, 4))
    content[position % len(content)] ^= 1 << bit

    with suppress(ManifestError):
        read(bytes(content))


@given(content=st.binary(max_size=200))
def test_anything_else_is_our_error_or_a_value(content):
    with suppress(ManifestError):
        read(b"\x80\x04" + content + b".")


@given(tree=TREES, length=st.integers(0, 10**6))
def test_pickle_cut_off_is_refused(tree, length):
    content = pickle.dumps(tree, 2)

    refusal(content[: length % len(content)])


def test_shared_and_ordered_values_are_read():
    shared = [1]
    tree = [shared, shared, collections.OrderedDict(a=shared), {1, 2}, frozenset("a")]

    found = read(pickle.dumps(tree, 4))

    assert found[0] is found[1] is found[2]["a"]
    assert found[3:] == [{1, 2}, {"a"}]


@pytest.mark.parametrize(
    "payload",
    [
        Payload(os.system, "false"),
        Payload(eval, "1"),
        Payload(exec, "1"),
        Payload(__import__, "os"),
        Payload(getattr, {}, "keys"),
        Payload(open, "/etc/passwd"),
        Payload(map, len, [[]]),
        Payload(type, "A", (), {}),
        Payload(pickle.loads, b"N."),
    ],
)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_call_is_refused_by_name_and_not_made(payload, protocol):
    function = payload.call[0]

    message = refusal(pickle.dumps({"a": [payload]}, protocol))

    assert function.__name__ in message
    assert "file.pt" in message


def by_name(module, enumeration, member):
    """Return a pickle as Python 3.11.0 to 3.11.3 write a member of an enumeration."""
    return (
        b"\x80\x02cbuiltins\ngetattr\n"
        + f"c{module}\n{enumeration}\n".encode()
        + b"X"
        + struct.pack("<I", len(member))
        + member.encode()
        + b"\x86R."
    )


@pytest.mark.parametrize(
    ("module", "enumeration", "member", "value"),
    [
        ("deepspeed.runtime.zero.config", "ZeroStageEnum", "gradients", 2),
        ("signal", "Signals", "SIGTERM", Opaque((15,))),
        ("megatron.core.enums", "ModelType", "retro", Opaque(("retro",))),
    ],
)
def test_member_of_an_enumeration_is_read_by_its_name(
    module, enumeration, member, value
):
    found = read(by_name(module, enumeration, member), allow=DEEPSPEED)

    if isinstance(value, Opaque):
        found, value = found.arguments, value.arguments
    assert found == value


def test_path_is_read_as_its_text_by_every_importer():
    pickled = pickle.dumps(PurePosixPath("/runs/one"), 2).replace(
        b"PurePosixPath", b"PosixPath"
    )
    path = read(pickled, allow=DEEPSPEED)

    assert PlainValues(None, "file.pt").value(path, "run") == "/runs/one"
    maker = NodeMaker("file.pt", len(pickled), lambda value: False)
    assert maker.node(path).value == "/runs/one"


def test_signal_is_read_as_a_constant_of_its_module():
    assert read(b"\x80\x02csignal\nSIGTERM\nq\x00.", allow=DEEPSPEED) == 15


@pytest.mark.parametrize(
    ("module", "name"), [("torch", "Size"), ("argparse", "Namespace")]
)
def test_attribute_of_anything_else_is_refused(module, name):
    message = refusal(by_name(module, name, "__init__"), allow=DEEPSPEED)

    assert "builtins.getattr" in message


def test_global_that_is_only_named_is_refused():
    assert "posix.system" in refusal(b"cposix\nsystem\n.")
    assert "os.system" in refusal(b"\x80\x04\x8c\x02os\x8c\x06system\x93.")
    assert "torch.load" in refusal(b"\x80\x02ctorch\nload\n.")


def test_dotted_name_is_no_way_in():
    init = b"\x8c\x0bcollections\x8c\x14OrderedDict.__init__\x93."

    assert "OrderedDict.__init__" in refusal(b"\x80\x04" + init)
    assert "OrderedDict" in refusal(b"\x80\x02ccollections.abc\nOrderedDict\n.")


@pytest.mark.parametrize(
    "content",
    [
        b"\x82\x01",  # EXT1: a class that copyreg knows by number
        b"(i__main__\nA\n",  # INST
        b"(o",  # OBJ
        b"P0\n",  # PERSID
        b"N0",  # POP
        b"N2",  # DUP
        b"I1\n",
        b"L1L\n",
        b"F1.0\n",
        b"S'a'\n",
        b"Va\n",
        b"(l",
        b"(d",
        b"\x97",  # NEXT_BUFFER
        b"U\x01a",
        b"\xff",
    ],
)
def test_instruction_that_data_needs_not_is_refused(content):
    assert "instruction" in refusal(b"\x80\x04" + content + b".")


def test_result_of_a_call_cannot_be_called():
    ordered = b"ccollections\nOrderedDict\n"

    assert "a call of" in refusal(b"\x80\x02" + ordered + b")R)R.")
    assert "a call of" in refusal(b"\x80\x02}(K\x01t)R.")


def test_state_is_refused_by_everything_but_stubs():
    for target in (b"]", b"ctorch\nSize\n", b"ccollections\nOrderedDict\n", b"K\x01"):
        state = b"}X\x09\x00\x00\x00__class__Nsb."

        assert "attributes of" in refusal(b"\x80\x02" + target + state)


@dataclass(frozen=True)
class Known(Stub):
    field: Any = None


def test_stub_takes_the_fields_that_it_declares():
    content = b"\x80\x02cthere\nOriginal\n)\x81}"
    content += b"(X\x05\x00\x00\x00fieldK\x07X\x09\x00\x00\x00set_stateK\x08ub."

    found = read(content, allow={("there", "Original"): Known})

    assert found == Known(7)
    assert found.__dict__ == {"field": 7}


def test_persistent_id_needs_someone_who_knows_it():
    content = b"\x80\x02K\x01X\x01\x00\x00\x00a\x86Q."

    assert read(content, persistent_load=list) == [1, "a"]
    assert "outside" in refusal(content)
    assert "persistent id" in refusal(b"\x80\x02]Q.", persistent_load=list)
    assert "persistent id" in refusal(b"\x80\x02]\x85Q.", persistent_load=list)


@pytest.mark.parametrize("protocol", [0, 1, 6, 255])
def test_other_protocols_are_refused(protocol):
    assert "protocol" in refusal(bytes([0x80, protocol]) + b"N.")


def test_longer_pickle_than_wanted_is_refused():
    assert "1000 bytes" in refusal(b"\x80\x02" + b"]" * 998, max_nbytes=999)


def huge(code, fmt, number):
    return b"\x80\x05" + code + struct.pack(fmt, number) + b"a."


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "content",
    [
        huge(b"B", "<I", 2**32 - 1),
        huge(b"\x8e", "<Q", 2**63),
        huge(b"\x96", "<Q", 2**62),
        huge(b"X", "<I", 2**32 - 1),
        huge(b"\x8d", "<Q", 2**63),
        huge(b"\x8b", "<I", 2**31),
        huge(b"\x95", "<Q", 2**63),
        b"\x80\x05\x8b" + struct.pack("<I", 10**6) + b"\xff" * 10**6 + b".",
        b"\x80\x05" + b"](" * 200_000 + b".",
        b"\x80\x05" + b"]" * 400_000 + b"N.",
        b"\x80\x05N" + b"\x85" * 100_000 + b"}\x94.",
    ],
)
def test_large_numbers_cost_no_memory(content):
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    refusal(content)

    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 200_000, f"{grown} KiB"


def test_memo_is_no_table_that_an_index_makes_large():
    assert read(b"\x80\x02Nr\xff\xff\xff\xffj\xff\xff\xff\xff\x86.") == (None, None)
    refusal(b"\x80\x02j\xff\xff\xff\xff.")


def nested_pairs(depth):
    """Return what makes (t, t), with t = (u, u), and so on, of one number."""
    return b"K\1" + b"".join(b"\x94h%c\x86" % level for level in range(depth))


@pytest.mark.timeout(20)
def test_key_that_takes_for_ever_to_hash_is_refused():
    pairs = nested_pairs(60)  # 2**60 steps

    assert "as a key" in refusal(b"\x80\x04}" + pairs + b"Ns.")
    assert "as a key" in refusal(b"\x80\x04\x8f(" + pairs + b"\x90.")


@pytest.mark.parametrize(
    ("key", "word"),
    [
        (b"]", "key of type list"),
        (b"}", "key of type dict"),
        (b"G\x3f\xf8\0\0\0\0\0\0", "key of type float"),
        (b"\x8a\x09" + b"\1" * 9, "large integer as a key"),
        (b"K\1\x85\x85", "nested tuple as a key"),
        (b"ctorch\nfloat32\n", "key of type TorchDtype"),
        (b"ctorch\nSize\n", "key of type function"),
    ],
)
def test_other_keys_are_refused(key, word):
    assert word in refusal(b"\x80\x04}" + key + b"Ns.")
    assert word in refusal(b"\x80\x04(" + key + b"\x91.")


@pytest.mark.timeout(20)
def test_bytes_made_over_and_over_from_one_text_are_refused():
    text = b"X" + struct.pack("<I", 10**6) + b"a" * 10**6 + b"q\x00"
    once = b"c_codecs\nencode\nh\x00\x85R"

    read(b"\x80\x02" + text + once + b"\x86.")
    assert "more containers" in refusal(b"\x80\x02(" + text + once * 1000 + b"t.")


@pytest.mark.timeout(20)
def test_values_that_grow_when_they_are_written_out_are_refused():
    value = ["a" * 1000]
    for _ in range(60):
        value = [value, value]
    found = read(pickle.dumps(value, 4))

    with pytest.raises(ManifestError, match="too many"):
        NodeMaker("file.pt", 2000, lambda _: False).node(found)


def test_values_that_hold_themselves_are_refused():
    value = []
    value.append(value)
    found = read(pickle.dumps(value, 4))

    with pytest.raises(ManifestError, match="nested too deep"):
        NodeMaker("file.pt", 100, lambda _: False).node(found)


def torch_pickle(value):
    torch = pytest.importorskip("torch")
    file = io.BytesIO()
    torch.save(value, file)
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
        return archive.read(next(n for n in names if n.endswith("/data.pkl")))


def test_all_that_torch_writes_for_tensors_is_read():
    torch = pytest.importorskip("torch")
    tensor = torch.arange(12.0).reshape(3, 4)[:, 1:]
    kinds = {
        "view": tensor,
        "parameter": torch.nn.Parameter(tensor),
        "float8": tensor.to(torch.float8_e5m2),
        "uint16": torch.ones(2, dtype=torch.uint16),
        "module": torch.nn.BatchNorm1d(3).state_dict(),
        "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]),
        "device": torch.device("cpu"),
    }

    found = read(torch_pickle(kinds), persistent_load=lambda identifier: identifier[2])

    view = found["view"]
    assert isinstance(view, StubTensor)
    assert (view.shape, view.strides, view.storage_offset) == ((3, 3), (4, 1), 1)
    assert found["float8"].dtype.name == "float8_e5m2"
    assert list(found["module"]) == list(kinds["module"])
    assert found["dtype"].name == "bfloat16"
    assert found["size"] == (2, 3)
    assert found["device"] == "cpu"


@pytest.mark.filterwarnings("ignore")
def test_tensor_of_another_kind_is_refused():
    torch = pytest.importorskip("torch")
    sparse = torch.eye(3).to_sparse()
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)

    for tensor in (sparse, quantized):
        assert "_rebuild_" in refusal(torch_pickle(tensor), persistent_load=list)


def test_shape_that_is_none_is_refused():
    rebuild = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n"

    for shape in (b"]N\x61\x85", b"J\xff\xff\xff\xff\x85", b"N"):
        arguments = b"(NK\x00" + shape + b"K\x01\x85\x89Nt"
        assert "damaged" in refusal(rebuild + arguments + b"R.")


def test_numpy_values_are_read_unless_they_hold_objects():
    values = [np.arange(6.0).reshape(2, 3).T, np.float32(2), np.array(3), np.ones(0)]

    for value in values:
        found = read(pickle.dumps(value, 4), allow=PLAIN_OBJECTS)
        array = getattr(found, "array", found)
        assert array.dtype == value.dtype
        assert array.tobytes() == value.tobytes()
    for value in (np.array([object]), np.array([(1, 2)], "i,f"), np.datetime64("now")):
        refusal(pickle.dumps(value, 4), allow=PLAIN_OBJECTS)


def test_opaque_object_keeps_its_attributes_as_they_are():
    content = b"\x80\x02cthere\nScaler\n)\x81}X\x04\x00\x00\x00loadK\x01sb."

    found = read(content, allow={("there", "Scaler"): Opaque})

    assert found.attributes == {"load": 1}


def test_reading_takes_time_in_proportion_to_the_length():
    def seconds(count):
        content = pickle.dumps([{"a": (n, [n])} for n in range(count)], 4)
        begin = time.process_time()
        read(content)
        return time.process_time() - begin

    seconds(1000)
    assert seconds(40_000) < 40 * max(seconds(4_000), 0.01)

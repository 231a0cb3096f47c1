"""Files of torch.save without torch: what is in them, and what is refused."""

import io
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from mpickpt import CheckpointError
from mpickpt.errors import CorruptShardError, IncompleteCheckpointError, ManifestError
from mpickpt.interop.sources.allowlist import STANDARD
from mpickpt.interop.sources.file import OpenFiles, SourceFile
from mpickpt.interop.sources.torch_file import StoredTensor, open_torch_file

torch = pytest.importorskip("torch")

TENSORS = {
    "float32": torch.arange(100.0),
    "bfloat16": torch.randn(7, 5).bfloat16(),
    "float8": torch.ones(3).to(torch.float8_e4m3fn),
    "uint16": torch.arange(5).to(torch.uint16),
    "bool": torch.tensor([True, False]),
    "complex": torch.randn(3, dtype=torch.complex64),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "scalar": torch.tensor(3),
    "nothing": torch.zeros(0, 3),
    "view": torch.arange(100.0)[10:20].view(2, 5),
    "transposed": torch.randn(1500, 1000).t(),
    "columns": torch.randn(9, 8)[:, 2:5],
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": torch.arange(40.0).reshape(40, 1).expand(40, 3),
}


def read(tensor, n_columns=None):
    """Read a tensor as a save does, in boxes of few columns if so asked."""
    whole = np.empty(tensor.shape, tensor.dtype)
    for offset, part in tensor.boxes():
        if not part.size:
            continue
        stream = part.as_streamed()
        inside = [slice(0, n) for n in part.shape]
        if n_columns and part.shape:
            last = part.shape[-1]
            boxes = [
                (*inside[:-1], slice(i, min(last, i + n_columns)))
                for i in range(0, last, n_columns)
            ]
        else:
            boxes = [tuple(inside)]
        for box in boxes:
            place = tuple(
                slice(o + s.start, o + s.stop) for o, s in zip(offset, box, strict=True)
            )
            whole[place] = stream.read(box)
    return whole


def as_bytes(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("n_columns", [None, 2])
@pytest.mark.parametrize("kind", TENSORS)
def test_tensor_is_read_bit_for_bit(tmp_path, kind, n_columns):
    torch.save({"x": TENSORS[kind]}, tmp_path / "x.pt")

    with open_torch_file(tmp_path / "x.pt") as file:
        stored = file.load()["x"]
        held = read(stored, n_columns)

        assert stored.shape == tuple(TENSORS[kind].shape)
        assert held.tobytes() == as_bytes(TENSORS[kind])
        assert file.open_entries == []


def test_views_share_a_storage(tmp_path):
    flat = torch.arange(10.0)
    torch.save({"a": flat[:4], "b": flat[4:], "tied": flat[:4]}, tmp_path / "x.pt")

    with open_torch_file(tmp_path / "x.pt") as file:
        content = file.load()

        assert content["a"].storage == content["b"].storage
        assert content["a"].place == content["tied"].place != content["b"].place


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_cast_rounds_as_torch_does(tmp_path, dtype):
    values = torch.cat([torch.randn(5000), torch.tensor([1e38, 7e4, 1e-42, -0.0])])
    torch.save(values, tmp_path / "x.pt")

    with open_torch_file(tmp_path / "x.pt") as file:
        stored = file.load()
        stream = stored.as_streamed(cast=np.dtype(dtype))
        held = stream.read((slice(0, stored.size),))

    assert held.tobytes() == as_bytes(values.to(getattr(torch, dtype)))


def test_slice_of_a_file_is_opened(tmp_path):
    item = io.BytesIO()
    torch.save(torch.arange(6), item)
    (tmp_path / "x").write_bytes(b"before" + item.getvalue() + b"after")

    with open_torch_file(tmp_path / "x", 6, len(item.getvalue())) as file:
        assert read(file.load()).tolist() == list(range(6))


def test_plain_values_are_loaded(tmp_path):
    values = {"a": [1, 2.5, None], 3: ("x", b"y", True), "big": 1 << 80}
    torch.save(values, tmp_path / "x.pt")

    with open_torch_file(tmp_path / "x.pt") as file:
        assert file.load() == values


def test_file_without_checksums_is_told(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(torch.arange(6), tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(True)

    with open_torch_file(tmp_path / "x.pt") as file:
        assert not file.is_checked
        assert read(file.load()).tolist() == list(range(6))


@pytest.mark.parametrize("fraction", [0, 0.01, 0.3, 0.9, 0.999])
def test_truncated_file_is_refused(tmp_path, fraction):
    path = saved(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * fraction)])

    with pytest.raises(IncompleteCheckpointError), open_torch_file(path):
        pass


def saved(folder):
    path = folder / "x.pt"
    torch.save({"a": torch.arange(5000), "b": [1, 2], "c": torch.tensor(1.5)}, path)
    return path


def test_flipped_bit_is_an_error_or_changes_nothing(tmp_path):
    path = saved(tmp_path)
    content = path.read_bytes()
    found = set()
    for at in range(0, len(content), 7):
        damaged = bytearray(content)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)

        try:
            with open_torch_file(path) as file:
                loaded = file.load()
                assert read(loaded["a"]).tolist() == list(range(5000))
                assert (loaded["b"], loaded["c"].small()) == ([1, 2], 1.5)
        except CheckpointError as error:
            found.add(type(error))

    assert CorruptShardError in found


def test_flipped_element_names_file_and_entry(tmp_path):
    path = saved(tmp_path)
    content = bytearray(path.read_bytes())
    content[content.index((4321).to_bytes(8, "little"))] ^= 1
    path.write_bytes(content)

    with open_torch_file(path) as file:
        tensor = file.load()["a"]
        with pytest.raises(CorruptShardError, match=r"x\.pt.*data/0") as raised:
            read(tensor)

    assert raised.value.path == str(path)
    assert raised.value.expected != raised.value.actual


def test_part_of_a_storage_is_verified_with_the_rest_of_it(tmp_path):
    path = saved(tmp_path)
    content = bytearray(path.read_bytes())
    content[content.index((4321).to_bytes(8, "little"))] ^= 1
    path.write_bytes(content)

    with open_torch_file(path) as file:
        part = file.load()["a"].run(10, (4,))
        with pytest.raises(CorruptShardError):
            read(part)


def test_old_format_is_refused_and_says_what_to_do(tmp_path):
    torch.save([1], tmp_path / "x.pt", _use_new_zipfile_serialization=False)

    with (
        pytest.raises(ManifestError, match="save it again"),
        open_torch_file(tmp_path / "x.pt"),
    ):
        pass


@pytest.mark.parametrize(
    ("name", "how", "refused"),
    [
        ("compressed", {"compression": zipfile.ZIP_DEFLATED}, ManifestError),
        ("no pickle", {"names": ["a/x"]}, ManifestError),
        ("outside", {"names": ["a/data.pkl", "../x"]}, ManifestError),
        ("absolute", {"names": ["a/data.pkl", "/etc/x"]}, ManifestError),
        ("other folder", {"names": ["a/data.pkl", "b/x"]}, CorruptShardError),
        ("twice", {"names": ["a/data.pkl", "a/data.pkl"]}, CorruptShardError),
        ("script", {"names": ["a/data.pkl", "a/constants.pkl"]}, ManifestError),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_other_zip_is_refused(tmp_path, name, how, refused):
    path = tmp_path / f"{name}.pt"
    names = how.get("names", ["a/data.pkl"])
    with zipfile.ZipFile(path, "w", how.get("compression", 0)) as made:
        for each in names:
            made.writestr(each, b"\x80\x02N." * 20)

    with pytest.raises(refused), open_torch_file(path):
        pass


def test_big_endian_file_is_refused(tmp_path):
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("a/data.pkl", b"\x80\x02N.")
        made.writestr("a/byteorder", b"big")

    with pytest.raises(ManifestError, match="byte order"), open_torch_file(path):
        pass


def test_tensor_outside_of_its_storage_is_refused(tmp_path):
    path = tmp_path / "x.pt"
    torch.save(torch.arange(4), path)
    pickled = zipfile.ZipFile(path).read("x/data.pkl")
    forged = pickled.replace(b"K\x04\x85", b"K\x05\x85")
    assert forged != pickled
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("x/data.pkl", forged)
        made.writestr("x/data/0", bytes(32))

    with open_torch_file(path) as file, pytest.raises(ManifestError, match="outside"):
        file.load()


def test_conjugated_tensor_is_refused(tmp_path):
    torch.save(torch.randn(3, dtype=torch.complex64).conj(), tmp_path / "x.pt")

    with (
        open_torch_file(tmp_path / "x.pt") as file,
        pytest.raises(ManifestError, match="conjugated"),
    ):
        file.load()


def test_symlink_is_refused(tmp_path):
    saved(tmp_path).rename(tmp_path / "real.pt")
    (tmp_path / "x.pt").symlink_to("real.pt")

    with pytest.raises(CheckpointError), open_torch_file(tmp_path / "x.pt"):
        pass


def test_class_that_is_not_allowed_is_refused_by_name(tmp_path):
    torch.save({"path": Path("x")}, tmp_path / "x.pt")

    with open_torch_file(tmp_path / "x.pt") as file:
        with pytest.raises(ManifestError, match=r"pathlib.*Path"):
            file.load()
        assert not any(name == "Path" for _, name in STANDARD)


def test_stored_tensor_is_cut_only_where_it_is(tmp_path):
    torch.save(torch.arange(4), tmp_path / "x.pt")

    with open_torch_file(tmp_path / "x.pt") as file:
        stored = file.load()
        assert isinstance(stored, StoredTensor)
        with pytest.raises(ValueError, match="no run"):
            stored.run(2, (3,))


def test_files_that_are_open_stay_few(tmp_path):
    opened = OpenFiles(most=2)
    names = [f"{number}.bin" for number in range(4)]
    for number, name in enumerate(names):
        (tmp_path / name).write_bytes(bytes([number]) * 8)
    sources = [SourceFile(tmp_path, name, opened=opened) for name in names]

    before = len(os.listdir("/proc/self/fd"))
    held = [source.read(2, 3) for source in sources * 2]

    assert held == [bytes([number]) * 3 for number in range(4)] * 2
    assert len(os.listdir("/proc/self/fd")) == before + 2
    for source in sources:
        source.close()
    assert len(os.listdir("/proc/self/fd")) == before

"""Turns a good foreign checkpoint into a bad one, and asks what an import says."""

import io
import os
import pickle  # noqa: TID251  to forge what an import must refuse
import random
import zipfile
from dataclasses import dataclass

import numpy as np

import mpickpt
from mpickpt import CheckpointError, importers

# Each is called by an unpickler that calls what it is told to.
PAYLOADS = {
    "os.system": ("os", "system", "touch {marker}"),
    "builtins.exec": ("builtins", "exec", "open({marker!r}, 'w')"),
    "builtins.eval": ("builtins", "eval", "open({marker!r}, 'w')"),
    "subprocess.Popen": ("subprocess", "Popen", ("touch", "{marker}")),
    "torch.hub.load": ("torch.hub", "load", "{marker}"),
    "pickle.loads": ("_pickle", "loads", b""),
    "builtins.getattr": ("builtins", "getattr", "os"),
}


# Pickles of few bytes that ask for much memory, or for a long time.
BOMBS = {
    "lists in lists": b"\x80\x02" + b"]" * 500_000 + b".",
    "marks": b"\x80\x02" + b"(" * 3_000_000 + b".",
    "long text": b"\x80\x04\x8d" + (1 << 40).to_bytes(8, "little") + b".",
    "long integer": b"\x80\x02\x8b" + (1 << 30).to_bytes(4, "little") + b".",
    "byte array": b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b".",
    "memo": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "doubled tuples": b"\x80\x02)" + b"2\x86" * 200_000 + b".",
    "no end": b"\x80\x02" + b"N0" * 1_000_000,
    "other protocol": b"(lp0\nI1\na.",
}


class Global:
    """Pickles as a call of something by its name, which need not exist here."""

    def __init__(self, module, name, argument):
        self.module, self.name, self.argument = module, name, argument


def forged(value, protocol=2):
    """Return a pickle of `value`, in which a `Global` may be anywhere."""

    class Pickler(pickle._Pickler):
        def save(self, obj, save_persistent_id=True):
            if not isinstance(obj, Global):
                return super().save(obj, save_persistent_id)
            self.write(f"c{obj.module}\n{obj.name}\n".encode())
            self.save((obj.argument,))
            self.write(b"R")
            return None

        def persistent_id(self, obj):
            return obj.id if isinstance(obj, PersistentId) else None

    file = io.BytesIO()
    pickler = Pickler(file, protocol)
    pickler.fast = True  # no memo, so that it can be put into another pickle
    pickler.dump(value)
    return file.getvalue()


@dataclass(frozen=True)
class PersistentId:
    """Pickles as a reference to a storage beside the pickle."""

    id: tuple


def payload(name, marker):
    module, function, argument = PAYLOADS[name]
    if isinstance(argument, tuple):
        argument = tuple(part.format(marker=marker) for part in argument)
    elif isinstance(argument, str):
        argument = argument.format(marker=marker)
    return Global(module, function, argument)


def with_call(pickled, call):
    """Return a pickle that makes a call before it goes on as it was.

    What the call returns is dropped, so that it is unpickled to the same value.
    """
    body = forged(call)[2:-1]
    head = pickled[:2]
    assert head[0] == 0x80, "not of protocol 2 or later"
    return head + body + b"0" + pickled[2:]


def rewrite_pickle(path, change, compression=zipfile.ZIP_STORED):
    """Replace the pickle of a file that torch.save wrote; its checksum is right."""
    with zipfile.ZipFile(path) as old:
        entries = [(entry.filename, old.read(entry)) for entry in old.infolist()]
    with zipfile.ZipFile(path, "w", compression) as new:
        for name, content in entries:
            is_pickle = name.endswith("/data.pkl")
            new.writestr(name, change(content) if is_pickle else content)


def rewrite_metadata(source, change):
    """Change the `.metadata` of a DCP checkpoint, as Python's objects."""
    path = next(source.rglob(".metadata"))
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def rewrite_item(source, name, change):
    """Replace the pickle of one item of a DCP checkpoint by another, put at the end."""

    def move(metadata):
        for index, info in metadata.storage_data.items():
            if index.fqn == name:
                path = next(source.rglob(info.relative_path))
                content = path.read_bytes()
                alone = path.with_name("item.pt")
                alone.write_bytes(content[info.offset : info.offset + info.length])
                rewrite_pickle(alone, change)
                info.offset, item = len(content), alone.read_bytes()
                info.length = len(item)
                path.write_bytes(content + item)
                alone.unlink()

    rewrite_metadata(source, move)


def files_of(source):
    """Return the files of a checkpoint, relative, those first that come first."""
    return sorted(
        path.relative_to(source) for path in source.rglob("*") if path.is_file()
    )


def places_in(nbytes, seed, count):
    """Return positions in a file: near its start, its end, and anywhere between."""
    chosen = random.Random(seed)
    edges = [0, 1, nbytes // 2, nbytes - 1]
    return sorted({*edges, *(chosen.randrange(nbytes) for _ in range(count))})


def flip(path, position, bit):
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def tree_of(target):
    with mpickpt.open_checkpoint(target) as checkpoint:
        return comparable(checkpoint.load())


def comparable(value):
    """Return a value in which arrays compare by type, shape and bits."""
    if isinstance(value, dict):
        return {key: comparable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [comparable(item) for item in value]
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, value.tobytes())
    return repr(value)


def refusal_of(kind, source, target, **options):
    """Return the error of an import, after which nothing may be there; None if none."""
    try:
        getattr(importers, kind)(source, target, **options)
    except CheckpointError as error:
        left = files_left(target)
        assert not left, left
        return error
    return None


def files_left(target):
    """Return what an import that failed has left, the library's own notes apart."""
    if not target.exists():
        return []
    found = [path for path in target.rglob("*") if path.is_file()]
    return [str(path) for path in found if ".mpickpt" not in path.parts]


def require_refused(kind, source, target, *words, **options):
    error = refusal_of(kind, source, target, **options)
    assert error is not None, "it was imported"
    for word in words:
        assert word in str(error), str(error)
    return error


def link_away(path, outside):
    """Replace a file or directory by a symlink to where it is moved."""
    os.rename(path, outside)  # noqa: TID251
    path.symlink_to(outside)

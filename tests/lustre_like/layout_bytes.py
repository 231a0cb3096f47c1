"""The structs of lustre_user.h that describe a layout, written down a second time.

Not derived from the library, so that the two check each other.
"""

import ctypes
from dataclasses import dataclass, replace

V1, V3, COMPOSITE = 0x0BD10BD0, 0x0BD30BD0, 0x0BD60BD0
RAID0 = 1
EOF = 2**64 - 1


class _Struct(ctypes.LittleEndianStructure):
    _pack_ = 1


class LovUserMd(_Struct):
    """`struct lov_user_md_v1`."""

    _fields_ = (
        ("magic", ctypes.c_uint32),
        ("pattern", ctypes.c_uint32),
        ("object_id", ctypes.c_uint64),
        ("object_seq", ctypes.c_uint64),
        ("stripe_size", ctypes.c_uint32),
        ("stripe_count", ctypes.c_uint16),
        ("stripe_offset", ctypes.c_uint16),
    )


class LovUserMdV3(_Struct):
    """`struct lov_user_md_v3`."""

    _fields_ = (("fixed", LovUserMd), ("pool", ctypes.c_char * 16))


class LovCompMd(_Struct):
    """`struct lov_comp_md_v1`, without its entries."""

    _fields_ = (
        ("magic", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("layout_gen", ctypes.c_uint32),
        ("flags", ctypes.c_uint16),
        ("entry_count", ctypes.c_uint16),
        ("mirror_count", ctypes.c_uint16),
        ("padding", ctypes.c_uint8 * 14),
    )


class LovCompEntry(_Struct):
    """`struct lov_comp_md_entry_v1`."""

    _fields_ = (
        ("id", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("start", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("offset", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("layout_gen", ctypes.c_uint32),
        ("timestamp", ctypes.c_uint64),
        ("padding", ctypes.c_uint32),
    )


class LovUserOstData(_Struct):
    """`struct lov_user_ost_data_v1`: an object of a file."""

    _fields_ = (
        ("object_id", ctypes.c_uint64),
        ("object_seq", ctypes.c_uint64),
        ("generation", ctypes.c_uint32),
        ("ost_index", ctypes.c_uint32),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """A layout, or one component of a composite one."""

    count: int
    size: int
    pool: str = ""
    start: int = 0
    end: int = EOF
    offset: int = -1

    def pack(self) -> bytes:
        """Return it as the attribute of a directory."""
        fixed = LovUserMd(
            magic=V3 if self.pool else V1,
            pattern=RAID0,
            stripe_size=self.size,
            stripe_count=self.count & 0xFFFF,
            stripe_offset=self.offset & 0xFFFF,
        )
        if not self.pool:
            return bytes(fixed)
        return bytes(LovUserMdV3(fixed=fixed, pool=self.pool.encode()))


def pack_composite(components: list[Plain]) -> bytes:
    """Return a composite layout as the attribute of a directory."""
    bodies = [component.pack() for component in components]
    head = ctypes.sizeof(LovCompMd) + len(bodies) * ctypes.sizeof(LovCompEntry)
    entries, offset = b"", head
    for component, body in zip(components, bodies, strict=True):
        entries += bytes(
            LovCompEntry(
                start=component.start,
                end=component.end,
                offset=offset,
                size=len(body),
            )
        )
        offset += len(body)
    header = LovCompMd(magic=COMPOSITE, size=offset, entry_count=len(bodies))
    return bytes(header) + entries + b"".join(bodies)


def unpack(value: bytes) -> list[Plain]:
    """Return the components; one for a plain layout. ValueError if it is neither."""
    magic = int.from_bytes(value[:4], "little")
    if magic != COMPOSITE:
        return [_unpack_plain(value)]
    count = LovCompMd.from_buffer_copy(value).entry_count
    first, length = ctypes.sizeof(LovCompMd), ctypes.sizeof(LovCompEntry)
    entries = [
        LovCompEntry.from_buffer_copy(value, first + n * length) for n in range(count)
    ]
    return [
        replace(
            _unpack_plain(value[entry.offset : entry.offset + entry.size]),
            start=entry.start,
            end=entry.end,
        )
        for entry in entries
    ]


def is_composite(value: bytes) -> bool:
    """Tell whether it is a composite layout."""
    return int.from_bytes(value[:4], "little") == COMPOSITE


def of_file(value: bytes, n_osts: int) -> bytes:
    """Return what a file gets that is created under a layout: objects on OSTs."""
    if is_composite(value):
        return value
    plain = _unpack_plain(value)
    count = min(plain.count, n_osts) if plain.count > 0 else n_osts
    fixed = replace(plain, count=count, offset=0).pack()
    objects = [LovUserOstData(object_id=1, ost_index=n) for n in range(count)]
    return fixed + b"".join(bytes(each) for each in objects)


def _unpack_plain(value: bytes) -> Plain:
    fixed = LovUserMd.from_buffer_copy(value)
    if fixed.magic not in (V1, V3):
        raise ValueError(f"magic {fixed.magic:#x}")
    pool = LovUserMdV3.from_buffer_copy(value).pool if fixed.magic == V3 else b""
    return Plain(
        count=ctypes.c_int16(fixed.stripe_count).value,
        size=fixed.stripe_size,
        pool=pool.decode(),
        offset=ctypes.c_int16(fixed.stripe_offset).value,
    )

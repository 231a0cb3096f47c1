"""Reads and sets how Lustre stripes files; knows `lfs` and the extended attribute.

`lfs` is asked where it is needed. Without it, layouts that are not composite are set
and read as `struct lov_user_md` of lustre_user.h, under the name "lustre.lov".
"""

import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from mpickpt.planning.stripe_layout import (
    ALL_OSTS,
    StripeComponent,
    StripeLayout,
    plain_layout,
    scaled,
)
from mpickpt.planning.striping_wish import ProgressiveStriping, Striping
from mpickpt.storage.site_command import run_site_command

LAYOUT_ATTRIBUTE = "lustre.lov"

# Magic, pattern, object id (two words), stripe size, stripe count, first OST; the
# third version goes on with the name of a pool, ended by a zero.
_LAYOUT = struct.Struct("<IIQQIHH")
_POOL = struct.Struct("16s")
_MAGIC_V1, _MAGIC_V3 = 0x0BD10BD0, 0x0BD30BD0
_MAGIC_COMPOSITE = 0x0BD60BD0
_RAID0 = 1
_ANY = 0xFFFF

_TIMEOUT_S = 10.0  # the first request to a busy metadata server takes seconds
_GIVEN = re.compile(
    r"\b(?:lmm_|lcme_extent\.)?"
    r"(e_start|e_end|stripe_count|stripe_size|pool|lcm_entry_count): +(\S+)"
)
_OST = re.compile(r"^\S+ +(\d+) +\d+ +(\d+) +\d+% .*\[OST:(\d+)\]", re.MULTILINE)

# What `lfs` said of a composite layout, by the bytes of the attribute.
_composites: dict[bytes, StripeLayout] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class OstSpace:
    """One object storage target, on which stripes lie."""

    index: int
    free_nbytes: int
    total_nbytes: int


def inherited_layout(path: Path) -> StripeLayout | None:
    """Return the layout of a file, or the one that new files of a directory will have.

    Returns
    -------
    StripeLayout or None
        Not known if it is composite and there is no `lfs`. None if nothing tells.
    """
    attribute = _attribute_of(path)
    layout = parse_attribute(attribute) if attribute else None
    if layout is not None and layout.is_known:
        return layout
    if attribute in _composites:
        return _composites[attribute]
    # Without -y, which `lfs` has since 2.11 only; the names are the same.
    text = run_site_command(["lfs", "getstripe", "-d", str(path)], _TIMEOUT_S)
    told = parse_getstripe(text) if text else None
    if told is not None and attribute and layout is not None:
        _composites[attribute] = told
    return told or layout


def apply(path: Path, striping: Striping | ProgressiveStriping) -> str | None:
    """Have new files of a directory striped; return why it was refused, or None.

    Notes
    -----
    Files that are there keep their layout. Whether it took is to be read back: of a
    file that has data, Lustre reports success and changes nothing.
    """
    if run_site_command(setstripe_command(path, striping), _TIMEOUT_S) is not None:
        return None
    if run_site_command(["lfs", "--version"]) is not None:
        return "`lfs setstripe` fails"  # a site's refusal, not to be gone around
    if isinstance(striping, ProgressiveStriping):
        return "a composite layout takes `lfs`, which is not here"
    try:
        os.setxattr(path, LAYOUT_ATTRIBUTE, layout_attribute(striping))
    except OSError as error:
        return f"there is no `lfs`, and setting {LAYOUT_ATTRIBUTE} fails: {error}"
    return None


def osts(directory: Path, pool: str | None = None) -> tuple[OstSpace, ...]:
    """Return the storage targets, of a pool or all; none if nothing tells."""
    limit = ["-p", pool] if pool else []
    # -l: one that is not connected is left out instead of waited for.
    text = run_site_command(["lfs", "df", "-l", *limit, str(directory)], _TIMEOUT_S)
    return parse_df(text or "")


def setstripe_command(
    path: Path, striping: Striping | ProgressiveStriping
) -> list[str]:
    """Return the command that sets a striping.

    No first OST is named: the servers balance load and space.
    """
    pool = ["-p", striping.pool] if striping.pool is not None else []
    parts = striping.layout.components
    is_composite = isinstance(striping, ProgressiveStriping)
    options: list[str] = []
    for part in parts:
        if is_composite:
            options += ["-E", "eof" if part.end is None else _lfs_size(part.end)]
        options += ["-c", str(part.count), "-S", _lfs_size(part.size), *pool]
    return ["lfs", "setstripe", *options, str(path)]


def layout_attribute(striping: Striping) -> bytes:
    """Return the value of the extended attribute that sets a striping."""
    magic = _MAGIC_V1 if striping.pool is None else _MAGIC_V3
    count = _ANY if striping.count == ALL_OSTS else striping.count
    fixed = _LAYOUT.pack(magic, _RAID0, 0, 0, striping.size, count, _ANY)
    if striping.pool is None:
        return fixed
    return fixed + _POOL.pack(striping.pool.encode())


def parse_attribute(value: bytes) -> StripeLayout | None:
    """Return the layout that the extended attribute tells of.

    Returns
    -------
    StripeLayout or None
        Not known if it is composite. None if it leaves count or size to the default
        of the file system, or is of another kind.
    """
    if len(value) >= 4 and int.from_bytes(value[:4], "little") == _MAGIC_COMPOSITE:
        return StripeLayout(components=(), is_composite=True)
    if len(value) < _LAYOUT.size:
        return None
    magic, _, _, _, size, count, _ = _LAYOUT.unpack_from(value)
    if magic not in (_MAGIC_V1, _MAGIC_V3) or not size or not count:
        return None
    pool = ""
    if magic == _MAGIC_V3 and len(value) >= _LAYOUT.size + _POOL.size:
        (name,) = _POOL.unpack_from(value, _LAYOUT.size)
        pool = name.partition(b"\0")[0].decode(errors="replace")
    return plain_layout(ALL_OSTS if count == _ANY else count, size, pool)


def parse_getstripe(text: str) -> StripeLayout | None:
    """Return the layout that ``lfs getstripe -d``, with or without -y, tells of.

    None if that is not to be understood.
    """
    parts: list[dict[str, str]] = [{}]
    for name, value in _GIVEN.findall(text):
        if name == "e_start":
            parts.append({})
        parts[-1][name] = value
    striped = [part for part in parts if {"stripe_count", "stripe_size"} <= part.keys()]
    try:
        components = tuple(_component(part) for part in striped)
    except ValueError:
        return None
    if not components:
        return None
    return StripeLayout(
        components=components,
        pool=next((part["pool"] for part in striped if "pool" in part), ""),
        is_composite="lcm_entry_count" in parts[0],
    )


def parse_df(text: str) -> tuple[OstSpace, ...]:
    """Return the storage targets that ``lfs df`` tells of, in KiB, one a line."""
    return tuple(
        OstSpace(
            index=int(index),
            free_nbytes=int(free) << 10,
            total_nbytes=int(total) << 10,
        )
        for total, free, index in _OST.findall(text)
    )


def _component(part: dict[str, str]) -> StripeComponent:
    end = part.get("e_end", "EOF")
    count, size = int(part["stripe_count"]), int(part["stripe_size"])
    if count < ALL_OSTS or size <= 0:
        raise ValueError
    return StripeComponent(
        start=int(part.get("e_start", "0")),
        end=None if end == "EOF" else int(end),
        count=count,
        size=size,
    )


def _attribute_of(path: Path) -> bytes | None:
    try:
        return os.getxattr(path, LAYOUT_ATTRIBUTE)
    except OSError:
        return None


def _lfs_size(nbytes: int) -> str:
    """Return a number of bytes as `lfs` reads it: "4M"."""
    return "{}{}".format(*scaled(nbytes))

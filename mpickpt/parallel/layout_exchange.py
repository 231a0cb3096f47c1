"""Agrees on the layout of a state when it changed: who holds and who writes what.

Each key is checked by one rank, its owner, to which the holders send their boxes, and
which answers who writes them; no rank ever sees the whole layout but the root, which
writes it to the layout file.
"""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgspec

from mpickpt.format.dtypes import parse_dtype
from mpickpt.format.hyperslab import Hyperslab
from mpickpt.format.layout_document import (
    LayoutEntry,
    dump_layout_line,
    join_layout_lines,
)
from mpickpt.format.records import ArrayRecord
from mpickpt.parallel.conversation import Conversation
from mpickpt.parallel.waiting import Steps
from mpickpt.planning.layout import HeldArray, HolderAnswer, Shape, entry_of
from mpickpt.planning.layout_rounds import (
    answers_to_holders,
    descriptions,
    resolved_keys,
)
from mpickpt.planning.layout_wire import unpack_answers

PHASE = "layout"
MAX_LAYOUT_NBYTES = 64 << 20
_FRAME_NBYTES = 64  # what stands around the lines of the document

Signature = tuple[Any, ...]
Parts = tuple[tuple[int, Hyperslab], ...]

_Kind = Literal["sharded", "replicated", "per_rank"]
_LISTED = get_args(_Kind)
_ROWS = msgspec.msgpack.Decoder(list[tuple[str, _Kind, str, Shape | None, bytes]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The agreed layout as one rank needs it.

    Attributes
    ----------
    signature : tuple
        This rank's description, for comparison with that of the next save.
    own_digest : bytes
        SHA-256 of it.
    digest : bytes
        SHA-256 over all ranks' descriptions.
    answers : mapping of str to HolderAnswer
        For each key of this rank: its boxes and who writes them.
    written : mapping of str to list of (int, Hyperslab)
        For each shared key: the parts that this rank writes, as `written_parts` of it.
    arrays : tuple of ArrayRecord
        All arrays of the state; on rank 0 only.
    layout_document : bytes or None
        On rank 0, the payload of the layout file; None where it would be too large.
    n_sharded_elements, written_nbytes : int
        What this rank writes: elements of sharded arrays, and bytes of all arrays but
        the per-rank ones, whose shapes may change from save to save.
    """

    signature: Signature
    own_digest: bytes
    digest: bytes
    answers: Mapping[str, HolderAnswer]
    written: Mapping[str, Parts]
    arrays: tuple[ArrayRecord, ...]
    layout_document: bytes | None
    n_sharded_elements: int
    written_nbytes: int


def resolve(
    talk: Conversation,
    held: Sequence[HeldArray],
    *,
    signature: Signature,
    own_digest: bytes,
    digest: bytes,
) -> Steps[Resolved]:
    """Agree with all ranks who holds and who writes what.

    Parameters
    ----------
    talk : Conversation
        The ranks.
    held : sequence of HeldArray
        What this rank says of its arrays.
    signature, own_digest, digest
        As in `Resolved`.

    Raises
    ------
    LayoutError
        On every rank, if the descriptions of some array do not fit together.
    """
    arrived = yield from talk.exchange(descriptions(held, talk.size), PHASE)
    layouts = yield from talk.agree(lambda: resolved_keys(arrived), PHASE)
    received = yield from talk.exchange(answers_to_holders(layouts), PHASE)
    answers = {a.key: a for part in received.values() for a in unpack_answers(part)}
    arrays, document = yield from _collect(talk, [entry_of(x) for x in layouts])
    written = {key: _parts_of(a, talk.rank) for key, a in answers.items()}
    sizes = {key: sum(p.size for _, p in parts) for key, parts in written.items()}
    return Resolved(
        signature=signature,
        own_digest=own_digest,
        digest=digest,
        answers=answers,
        written=written,
        arrays=arrays,
        layout_document=document,
        n_sharded_elements=sum(sizes[x.key] for x in held if x.kind == "sharded"),
        written_nbytes=sum(
            sizes[key] * parse_dtype(a.dtype).itemsize
            for key, a in answers.items()
            if a.dtype and sizes[key]
        ),
    )


def _collect(
    talk: Conversation, entries: Sequence[LayoutEntry]
) -> Steps[tuple[tuple[ArrayRecord, ...], bytes | None]]:
    """Return all arrays, and the layout document unless it is too large, on rank 0."""
    # Owners render their lines, so that the root joins them without a look at a box.
    lines = [(one, dump_layout_line(one)) for one in entries if one.kind in _LISTED]
    nbytes = struct.pack("<q", sum(len(line) + 2 for _, line in lines))
    lengths = yield from talk.allgather(nbytes, PHASE)
    total = sum(struct.unpack("<q", length)[0] for length in lengths)
    fits = total + _FRAME_NBYTES <= MAX_LAYOUT_NBYTES
    rows = [
        (one.key, one.kind, one.dtype, one.global_shape, line if fits else b"")
        for one, line in lines
    ]
    gathered = yield from talk.gather(msgspec.msgpack.encode(rows), PHASE)
    if gathered is None:
        return (), None
    found = sorted(row for packed in gathered for row in _ROWS.decode(packed))
    arrays = tuple(
        ArrayRecord(key=key, kind=kind, dtype=dtype, global_shape=shape)
        for key, kind, dtype, shape, _ in found
    )
    return arrays, join_layout_lines([row[-1] for row in found]) if fits else None


def _parts_of(answer: HolderAnswer, rank: int) -> Parts:
    """Return the parts of a shared array that a rank writes; each but once."""
    parts: dict[Hyperslab, int] = {}
    for number, (box, share) in enumerate(answer.boxes):
        part = share.part_of(box, rank)
        if box.is_empty and share.holders[share.start] == rank:
            part = box  # so that the array is there, with its type, for other readers
        if part is not None:
            parts.setdefault(part, number)
    return tuple((number, part) for part, number in parts.items())


def digest_of_signature(signature: Signature) -> bytes:
    """Return the SHA-256 of one rank's description."""
    return hashlib.sha256(repr(signature).encode("utf-8", "surrogatepass")).digest()

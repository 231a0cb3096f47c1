"""Agrees on the layout of a state when it changed: who holds and who writes what.

Each key is checked by one rank, its owner, to which the holders send their boxes, and
which answers who writes them; no rank ever sees the whole layout but the root, which
writes it to the layout file.
"""

import hashlib
import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpickpt.errors import LayoutError
from mpickpt.format.hyperslab import Hyperslab
from mpickpt.format.layout_document import LayoutEntry, dump_layout_document
from mpickpt.format.records import ArrayRecord
from mpickpt.parallel.conversation import Conversation
from mpickpt.parallel.waiting import Steps
from mpickpt.planning.layout import (
    HeldArray,
    HolderAnswer,
    answer_for,
    entry_of,
    owner_of,
)
from mpickpt.planning.layout_wire import (
    pack_answers,
    pack_entries,
    pack_held,
    unpack_answers,
    unpack_entries,
    unpack_held,
)
from mpickpt.planning.resolve import resolve_array

PHASE = "layout"
MAX_LAYOUT_NBYTES = 64 << 20

Signature = tuple[Any, ...]
Parts = tuple[tuple[int, Hyperslab], ...]


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
    """

    signature: Signature
    own_digest: bytes
    digest: bytes
    answers: Mapping[str, HolderAnswer]
    written: Mapping[str, Parts]
    arrays: tuple[ArrayRecord, ...]
    layout_document: bytes | None


def resolve(
    talk: Conversation,
    held: Sequence[HeldArray],
    *,
    signature: Signature,
    digest: bytes,
) -> Steps[Resolved]:
    """Agree with all ranks who holds and who writes what.

    Parameters
    ----------
    talk : Conversation
        The ranks.
    held : sequence of HeldArray
        What this rank says of its arrays.
    signature, digest
        As in `Resolved`.

    Raises
    ------
    LayoutError
        On every rank, if the descriptions of some array do not fit together.
    """
    arrived = yield from talk.exchange(_addressed(held, talk.size), PHASE)
    layouts, failure = [], None
    try:
        layouts = _resolve_keys(arrived)
    except LayoutError as error:
        failure = error
    yield from talk.settle(failure, PHASE)
    outgoing: defaultdict[int, list[HolderAnswer]] = defaultdict(list)
    for layout in layouts:
        for rank in layout.held:
            outgoing[rank].append(answer_for(layout, rank))
    packed = {rank: pack_answers(answers) for rank, answers in outgoing.items()}
    received = yield from talk.exchange(packed, PHASE)
    answers = {a.key: a for part in received.values() for a in unpack_answers(part)}
    arrays, document = yield from _collect(talk, [entry_of(x) for x in layouts])
    return Resolved(
        signature=signature,
        own_digest=digest_of_signature(signature),
        digest=digest,
        answers=answers,
        written={key: _parts_of(a, talk.rank) for key, a in answers.items()},
        arrays=arrays,
        layout_document=document,
    )


def _addressed(held: Sequence[HeldArray], size: int) -> dict[int, bytes]:
    outgoing: defaultdict[int, list[HeldArray]] = defaultdict(list)
    for array in held:
        outgoing[owner_of(array.key, size)].append(array)
    return {owner: pack_held(arrays) for owner, arrays in outgoing.items()}


def _resolve_keys(arrived: Mapping[int, bytes]) -> list[Any]:
    by_key: defaultdict[str, list[tuple[int, HeldArray]]] = defaultdict(list)
    for rank, packed in arrived.items():
        for array in unpack_held(packed):
            by_key[array.key].append((rank, array))
    return [resolve_array(key, held) for key, held in sorted(by_key.items())]


def _collect(
    talk: Conversation, entries: Sequence[LayoutEntry]
) -> Steps[tuple[tuple[ArrayRecord, ...], bytes | None]]:
    """Return all arrays, and the layout document unless it is too large, on rank 0."""
    entries = [entry for entry in entries if entry.kind != "replicated_plain"]
    full = pack_entries(entries)
    lengths = yield from talk.allgather(struct.pack("<q", len(full)), PHASE)
    fits = sum(struct.unpack("<q", n)[0] for n in lengths) <= MAX_LAYOUT_NBYTES
    if not fits:
        bare = [_without_parts(entry) for entry in entries]
        full = pack_entries(bare)
    gathered = yield from talk.gather(full, PHASE)
    if gathered is None:
        return (), None
    found = [entry for packed in gathered for entry in unpack_entries(packed)]
    found.sort(key=lambda entry: entry.key)
    arrays = tuple(
        ArrayRecord(
            key=entry.key,
            kind=entry.kind,  # type: ignore[arg-type]
            dtype=entry.dtype,
            global_shape=entry.global_shape,
        )
        for entry in found
    )
    document = dump_layout_document(found) if fits else None
    if document is not None and len(document) > MAX_LAYOUT_NBYTES:
        document = None
    return arrays, document


def _without_parts(entry: LayoutEntry) -> LayoutEntry:
    return LayoutEntry(
        key=entry.key,
        kind=entry.kind,
        dtype=entry.dtype,
        global_shape=entry.global_shape,
        parts=(),
    )


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

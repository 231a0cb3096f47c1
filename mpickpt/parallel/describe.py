"""First phase of a save: flatten the state and agree who holds and who writes what.

In the steady state this is one Allgather of fixed size. Only when some rank's layout
changed is it described anew: each key is checked by one rank, its owner, to which the
holders send their boxes, and which answers who writes them.
"""

import hashlib
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mpickpt.errors import CallMismatchError
from mpickpt.format.dtypes import dtype_name
from mpickpt.format.hyperslab import Hyperslab
from mpickpt.parallel.conversation import Conversation
from mpickpt.parallel.layout_exchange import (
    Parts,
    Resolved,
    Signature,
    digest_of_signature,
    resolve,
)
from mpickpt.parallel.replicas import ReplicaCheck, find_divergence
from mpickpt.parallel.waiting import Steps
from mpickpt.planning.flatten import FlatState, HeldLeaf, flatten
from mpickpt.planning.layout import HeldArray
from mpickpt.planning.node_map import NodeMap
from mpickpt.storage.shard_draft import ShardLayout

PHASE = "describe"

Table = np.ndarray[Any, Any]

# What every rank tells all others; read as columns, for there may be 65,536 rows.
_RECORD = struct.Struct("<?32s32s16sqq16s16s")
_TABLE = np.dtype(
    [
        ("fine", "?"),
        ("own_digest", "<u8", 4),
        ("digest", "<u8", 4),
        ("path", "<u8", 2),
        ("step", "<i8"),
        ("nbytes", "<i8"),
        ("options", "<u8", 2),
        ("check", "<u4", 4),
    ]
)
_SECOND_RECORD = struct.Struct("<q16s")
_SECOND_TABLE = np.dtype([("nbytes", "<i8"), ("check", "<u4", 4)])


@dataclass(slots=True)
class SaveMemory:
    """What one communicator's saves remember from one to the next."""

    resolved: Resolved | None = None
    n_saves: int | None = None
    shard: ShardLayout | None = None
    shard_made_for: tuple[Any, ...] | None = None
    known_shared: bool = False
    told_permissions: bool = False
    apart: NodeMap | None = None


_MOST_STREAMS = 4


def memory_of(memory: dict[str, Any], run_dir: Path) -> SaveMemory:
    """Return what the saves to one run directory remember; the last few are kept."""
    streams: dict[Path, SaveMemory] = memory.setdefault("saves", {})
    found = streams.pop(run_dir, None) or SaveMemory()
    streams[run_dir] = found
    while len(streams) > _MOST_STREAMS:
        del streams[next(iter(streams))]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """The state of one rank, flattened, with the layout that all ranks agreed on.

    `nbytes` is what all ranks together are going to write of their arrays, and
    `nbytes_by_rank`, an array of int64, what each is.
    """

    flat: FlatState
    resolved: Resolved
    nbytes: int
    nbytes_by_rank: Table


def describe(
    talk: Conversation,
    memory: SaveMemory,
    state: Callable[[], Any],
    *,
    check: Callable[[], None],
    path: str,
    step: int,
    options: object,
) -> Steps[Description]:
    """Flatten the state and agree on its layout, or raise the same error everywhere.

    Raises
    ------
    StateTypeError, LayoutError, ReplicaMismatchError, CallMismatchError
    """
    own = _OwnDescription(talk, memory, state, step, check)
    call = (_short(path), _short(repr(options)))
    records = yield from talk.allgather(own.record(call), PHASE)
    table = np.frombuffer(b"".join(records), _TABLE)
    if not table["fine"].all():
        yield from talk.settle(own.failure, PHASE)
    _require_same_call(table)
    memory.n_saves = own.turn + 1
    digest = hashlib.sha256(table["own_digest"].tobytes()).digest()
    if (table["digest"] != np.frombuffer(digest, "<u8")).any():
        memory.resolved = None
        memory.resolved = yield from resolve(
            talk,
            own.held(),
            signature=own.signature,
            own_digest=own.digest,
            digest=digest,
        )
        own.check_replicas(memory.resolved)
        second = _SECOND_RECORD.pack(own.nbytes, own.check.sum_bytes())
        records = yield from talk.allgather(second, PHASE)
        table = np.frombuffer(b"".join(records), _SECOND_TABLE)
    resolved = memory.resolved
    assert resolved is not None
    if not ReplicaCheck.cancels(table["check"]):
        yield from find_divergence(talk, own.check)
    return Description(
        flat=own.flat,
        resolved=resolved,
        nbytes=int(table["nbytes"].sum()),
        nbytes_by_rank=table["nbytes"],
    )


class _OwnDescription:
    """What this rank has to say; a failure is kept as a value until it is agreed."""

    def __init__(
        self,
        talk: Conversation,
        memory: SaveMemory,
        state: Callable[[], Any],
        step: int,
        check: Callable[[], None],
    ) -> None:
        self.rank = talk.rank
        self.size = talk.size
        self.step = step if isinstance(step, int) and 0 <= step < 2**63 else -1
        self.turn = self.step if memory.n_saves is None else memory.n_saves
        self.failure: Exception | None = None
        self.known: Resolved | None = None
        self.nbytes = 0
        self.check = ReplicaCheck(self.rank, self.size, self.turn)
        self.signature: Signature = ()
        try:
            check()
            self.flat = flatten(state(), alone=self.size == 1)
            self.plain = self.flat.replicated_plain
            self.signature = _signature(self.flat, self.plain)
            known = memory.resolved
            if known is not None and known.signature == self.signature:
                self.known = known
                self.check_replicas(known)
        except Exception as failure:
            self.failure = failure

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the signature."""
        if self.known is not None:
            return self.known.own_digest
        return digest_of_signature(self.signature)

    def check_replicas(self, resolved: Resolved) -> None:
        """Digest the replicated parts whose turn it is; count the bytes to write."""
        self.nbytes = resolved.written_nbytes + sum(
            array.nbytes
            for leaf in self.flat.leaves
            if leaf.kind == "per_rank"
            for _, array in leaf.boxes
        )
        self.check = ReplicaCheck(self.rank, self.size, self.turn)
        for leaf in self.flat.leaves:
            if leaf.kind == "replicated" and leaf.check != "off":
                self.check.add_array(leaf, resolved.answers[leaf.key])
        for key, encoded in self.plain.items():
            self.check.add_plain(key, encoded, resolved.answers[key])

    def record(self, call: tuple[bytes, bytes]) -> bytes:
        path, options = call
        known = self.known
        return _RECORD.pack(
            self.failure is None,
            self.digest,
            known.digest if known else bytes(32),
            path,
            self.step,
            self.nbytes,
            options,
            self.check.sum_bytes(),
        )

    def held(self) -> list[HeldArray]:
        arrays = [held_array(leaf) for leaf in self.flat.leaves]
        return arrays + [
            HeldArray(
                key=key,
                kind="replicated_plain",
                dtype=None,
                global_shape=None,
                boxes=(),
            )
            for key in self.plain
        ]


def held_array(leaf: HeldLeaf) -> HeldArray:
    """Return what this rank says of one array."""
    per_rank = leaf.kind == "per_rank"
    boxes = () if per_rank else tuple(_boxes(leaf))
    return HeldArray(
        key=leaf.key,
        kind=leaf.kind,
        dtype=None if leaf.dtype is None else dtype_name(leaf.dtype),
        global_shape=leaf.global_shape,
        boxes=boxes,
    )


def written_parts(leaf: HeldLeaf, resolved: Resolved) -> Parts:
    """Return the parts of an array that this rank writes.

    Returns
    -------
    tuple of (int, Hyperslab)
        The number of the box among the leaf's, and the part of it, in the index space
        of the global array.
    """
    if leaf.kind == "per_rank":
        return tuple((0, box) for box in _boxes(leaf))
    return resolved.written[leaf.key]


def _boxes(leaf: HeldLeaf) -> Iterator[Hyperslab]:
    for offset, array in leaf.boxes:
        yield Hyperslab(offset, tuple(array.shape))


def _signature(flat: FlatState, plain: Mapping[str, Any]) -> Signature:
    arrays = tuple(
        (
            leaf.key,
            leaf.kind,
            None if leaf.dtype is None else dtype_name(leaf.dtype),
            leaf.global_shape,
            leaf.check,
            leaf.bare,
            ()
            if leaf.kind == "per_rank"
            else tuple((offset, array.shape) for offset, array in leaf.boxes),
        )
        for leaf in flat.leaves
    )
    return (arrays, tuple(plain))


def _require_same_call(table: Table) -> None:
    for name in ("path", "step", "options"):
        values = table[name].reshape(len(table), -1)
        others = np.flatnonzero((values != values[0]).any(axis=1)).tolist()
        if others:
            first, other = table["step"][[0, others[0]]].tolist()
            detail = f" ({other}, not {first})" if name == "step" else ""
            raise CallMismatchError(
                f"rank {others[0]} called save_sharded with another {name} than rank "
                f"0{detail}; every rank must pass the same path, step, overwrite and "
                "options",
                rank=others[0],
            )


def _short(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:16]

"""Finds replicated values that are not the same on all ranks, at a fixed cost.

Every holder of a part digests it. The rank that writes the part subtracts the digest
as often as the others add it, so the sum over all ranks is zero when they agree, for
any pattern of holders. One number of 16 bytes a rank travels; only when the sum is
not zero do the ranks exchange the digests themselves, to name key and ranks.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import msgspec

from mpickpt.errors import ReplicaMismatchError
from mpickpt.format.hyperslab import Hyperslab
from mpickpt.format.tree import Plain
from mpickpt.parallel.conversation import Conversation
from mpickpt.parallel.waiting import Steps
from mpickpt.planning.flatten import HeldLeaf
from mpickpt.planning.layout import HolderAnswer, Share, owner_of
from mpickpt.planning.merge import pack_tree
from mpickpt.storage.regions import pieces_of

PHASE = "compare replicas"
_MODULUS = 1 << 128


class ReplicaCheck:
    """One rank's share in the comparison of one save.

    Parameters
    ----------
    rank, size : int
        This rank and the number of ranks.
    turn : int
        Number of the save: which writer's parts are compared when `check` is
        "rotate".
    """

    def __init__(self, rank: int, size: int, turn: int) -> None:
        self.rank = rank
        self.size = size
        self.writer_of_turn = turn % size
        self.total = 0
        self.digests: dict[str, int] = {}

    def add_array(self, leaf: HeldLeaf, answer: HolderAnswer) -> None:
        """Digest the parts of an array whose turn it is."""
        for (box, share), (_, array) in zip(answer.boxes, leaf.boxes, strict=True):
            if len(share.holders) == 1:
                continue
            for part, writer in self._compared(leaf, box, share):
                self._add_part(leaf.key, box, part, array, len(share.holders), writer)

    def add_plain(self, key: str, value: Plain, answer: HolderAnswer) -> None:
        """Digest a plain value: always, since it costs nothing."""
        ((_, share),) = answer.boxes
        writer = share.holders[share.start]
        if len(share.holders) > 1:
            self._add(f"{key}@plain", [pack_tree(value)], len(share.holders), writer)

    def sum_bytes(self) -> bytes:
        """Return this rank's number."""
        return self.total.to_bytes(16, "little")

    @staticmethod
    def cancels(numbers: Any) -> bool:
        """Tell whether the numbers of all ranks say that all replicas are equal.

        Parameters
        ----------
        numbers : ndarray of uint32, shape (size, 4)
            What each rank's `sum_bytes` gave, in four parts, the lowest first.
        """
        parts = numbers.sum(axis=0, dtype="u8").tolist()
        total = sum(part << 32 * place for place, part in enumerate(parts))
        return bool(total % _MODULUS == 0)

    def _compared(
        self, leaf: HeldLeaf, box: Hyperslab, share: Share
    ) -> list[tuple[Hyperslab, int]]:
        """Return the parts of a box that are compared this time, with their writers."""
        if leaf.check == "full":
            return share.parts(box)
        part = share.part_of(box, self.writer_of_turn)
        return [] if part is None else [(part, self.writer_of_turn)]

    def _add_part(
        self,
        key: str,
        box: Hyperslab,
        part: Hyperslab,
        array: Any,
        n_holders: int,
        writer: int,
    ) -> None:
        name = f"{key}@{part.offset}"
        view = array[part.relative_to(box).slices()]
        self._add(name, pieces_of(view), n_holders, writer)

    def _add(
        self, name: str, chunks: Iterable[Any], n_holders: int, writer: int
    ) -> None:
        hasher = hashlib.sha256(name.encode("utf-8", "surrogatepass"))
        for chunk in chunks:
            hasher.update(chunk)
        digest = int.from_bytes(hasher.digest()[:16], "little")
        self.digests[name] = digest
        weight = 1 - n_holders if writer == self.rank else 1
        self.total = (self.total + weight * digest) % _MODULUS


def find_divergence(talk: Conversation, check: ReplicaCheck) -> Steps[None]:
    """Raise `ReplicaMismatchError` on every rank, naming the key and the ranks."""
    outgoing: defaultdict[int, list[tuple[str, str]]] = defaultdict(list)
    for name, digest in check.digests.items():
        outgoing[owner_of(name, talk.size)].append((name, f"{digest:032x}"))
    packed = {rank: msgspec.json.encode(rows) for rank, rows in outgoing.items()}
    arrived = yield from talk.exchange(packed, PHASE)
    seen: defaultdict[str, dict[int, str]] = defaultdict(dict)
    for rank, rows in arrived.items():
        for name, digest in msgspec.json.decode(rows):
            seen[name][rank] = digest
    yield from talk.settle(_divergence(seen), PHASE)


def _divergence(seen: dict[str, dict[int, str]]) -> ReplicaMismatchError | None:
    for name, by_rank in sorted(seen.items()):
        common = Counter(by_rank.values()).most_common(1)[0][0]
        others = [rank for rank, digest in sorted(by_rank.items()) if digest != common]
        if others:
            key = name.rpartition("@")[0]
            return ReplicaMismatchError(
                f"{key!r} is Replicated, but differs on ranks {others[:8]} from the "
                f"others of {len(by_rank)}; make it equal everywhere before the save, "
                "or mark it PerRank or Sharded",
                key=key,
                ranks=others,
            )
    return None

"""What the saved ranks had: their trees merged into one, and single ones on demand."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from mpickpt.format.naming import Path as KeyPath
from mpickpt.format.records import ShardManifest
from mpickpt.format.tree import Node
from mpickpt.parallel.conversation import Conversation
from mpickpt.parallel.waiting import Steps
from mpickpt.planning.merge import merge, pack_tree, skeleton, unpack_tree
from mpickpt.planning.tree_walk import find
from mpickpt.storage.places import Place
from mpickpt.storage.saved_state import SavedState
from mpickpt.storage.shard_reader import ShardReader

PHASE = "read indexes"

Rename = Callable[[Node], Node]
_Part = tuple[bytes, list[tuple[int, dict[str, str]]]]


class SavedRanks:
    """The saved ranks of one checkpoint, read when asked for.

    Parameters
    ----------
    directory : Path or RemotePath
        Of the checkpoint.
    manifest : ShardManifest
        Its manifest.
    rename : callable
        Applied to the tree of every saved rank.
    """

    def __init__(
        self, directory: Place, manifest: ShardManifest, rename: Rename
    ) -> None:
        self.size = manifest.world_size
        self._state = SavedState(directory, manifest)
        self._rename = rename
        self._trees: dict[int, Node] = {}
        self._unequal: set[str] = set()

    def reader(self, rank: int) -> ShardReader:
        """Return the reader of one shard."""
        return self._state.shards.of(rank)

    def require_listed(self, rank: int) -> None:
        """Read the index of one shard; raise unless the manifest says the same."""
        self._state.require_listed(rank)

    def tree(self, rank: int) -> Node:
        """Return the tree of one saved rank."""
        if rank not in self._trees:
            self._trees[rank] = self._rename(self._state.tree_of(rank))
        return self._trees[rank]

    def node(self, rank: int, path: KeyPath) -> Node | None:
        """Return what a saved rank had at a path."""
        return find(self.tree(rank), path)

    def equal(self, key: str) -> bool:
        """Tell whether all saved ranks had the same per-rank value there."""
        return key not in self._unequal

    def sequence(self, path: KeyPath) -> Sequence[Any]:
        """Return the values of all saved ranks at a path, read when asked for."""
        return _Values(self, path)

    def value(self, rank: int, path: KeyPath) -> Any:
        """Return what a saved rank had at a path, its arrays read and verified."""
        node = self.node(rank, path)
        if node is None:
            raise KeyError(f"saved rank {rank} has nothing at {path}")
        return self._state.value_of_node(rank, node)

    def merged(self, talk: Conversation, own: Sequence[int]) -> Steps[Node]:
        """Return the union of all saved trees, of which each rank reads a part.

        Parameters
        ----------
        talk : Conversation
            The present ranks.
        own : sequence of int
            Saved ranks whose indexes this rank reads.
        """
        packed = yield from talk.agree(lambda: self.packed_part(own), PHASE)
        gathered = yield from talk.gather(packed, PHASE)
        answer = yield from talk.on_root(lambda: _joined(gathered or ()), PHASE)
        tree, unequal = msgspec.msgpack.decode(answer, type=tuple[bytes, list[str]])
        self._unequal = set(unequal)
        yield from self.share_first(talk)
        return unpack_tree(tree)

    def share_first(self, talk: Conversation) -> Steps[None]:
        """Give all ranks the index of saved rank 0, which rank 0 reads.

        Values that were equal on all saved ranks are taken from there: else every rank
        would open that one shard.
        """

        def read() -> bytes:
            text = self.reader(0).index_text()
            self.reader(0).take_index(text)
            return text

        text = yield from talk.on_root(read, PHASE)
        if talk.rank:
            self.reader(0).take_index(text)
        self.tree(0)

    def packed_part(self, own: Sequence[int]) -> bytes:
        """Return the union of some saved trees, and the digests of per-rank values."""
        parts = [skeleton(self.tree(rank)) for rank in own]
        tree = pack_tree(merge([tree for tree, _ in parts])) if parts else b""
        digests = [(rank, part[1]) for rank, part in zip(own, parts, strict=True)]
        return msgspec.msgpack.encode((tree, digests))


def _joined(gathered: Sequence[bytes]) -> bytes:
    """Return the merged tree, and the keys of per-rank values that are not equal."""
    parts = [msgspec.msgpack.decode(packed, type=_Part) for packed in gathered]
    distinct = dict.fromkeys(tree for tree, _ in parts if tree)
    digests = [digest for _, listed in parts for _, digest in listed]
    keys = {key for digest in digests for key in digest}
    unequal = [key for key in keys if len({d.get(key) for d in digests}) > 1]
    tree = merge([unpack_tree(packed) for packed in distinct])
    return msgspec.msgpack.encode((pack_tree(tree), sorted(unequal)))


class _Values(Sequence[Any]):
    """The values of all saved ranks at one path."""

    def __init__(self, ranks: SavedRanks, path: KeyPath) -> None:
        self._ranks = ranks
        self._path = path

    def __len__(self) -> int:
        return self._ranks.size

    def __getitem__(self, rank: Any) -> Any:
        numbers = range(len(self))[rank]
        if isinstance(numbers, range):
            return [self._ranks.value(number, self._path) for number in numbers]
        return self._ranks.value(numbers, self._path)

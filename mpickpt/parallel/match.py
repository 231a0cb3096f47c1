"""Matches what was saved with what the ranks want, and agrees on the verdict."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from mpickpt.errors import CheckpointError, LayoutError, WorldSizeMismatchError
from mpickpt.format.records import ShardManifest
from mpickpt.format.tree import Node
from mpickpt.parallel.conversation import Conversation
from mpickpt.parallel.saved_ranks import SavedRanks
from mpickpt.parallel.waiting import Steps
from mpickpt.planning.flatten import FlatState
from mpickpt.planning.layout import owner_of
from mpickpt.planning.merge import overlay
from mpickpt.planning.template import Matcher
from mpickpt.planning.tree_walk import leaves
from mpickpt.planning.wants import Rules, Want, WantList

PHASE = "match"

_FITS, _MOVED, _FAILED = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchOptions:
    """The ways out that the caller of a load chose."""

    rules: Rules
    reshard: bool
    ignore_unexpected: bool
    only: tuple[str, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """What to fetch, and how the restored state is built around it."""

    wants: Sequence[Want]
    build: Callable[[], Any]
    in_place: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching:
    """One rank's matching of a checkpoint with its template.

    Attributes
    ----------
    talk : Conversation
        The ranks.
    manifest : ShardManifest
        Of the checkpoint.
    template : FlatState or None
        The flattened `like`.
    ranks : SavedRanks
        What the saved ranks had.
    own : sequence of int
        Saved ranks whose shards this rank reads.
    options : MatchOptions
        What the caller allows.
    """

    talk: Conversation
    manifest: ShardManifest
    template: FlatState | None
    ranks: SavedRanks
    own: Sequence[int]
    options: MatchOptions

    def steps(self) -> Steps[Matched]:
        """Return what this rank fetches, or raise the same error on every rank."""
        if self.manifest.world_size == self.talk.size:
            matched = yield from self.in_place()
            if matched is not None:
                return matched
        return (yield from self.anywhere())

    def in_place(self) -> Steps[Matched | None]:
        """Match with the boxes as saved; None where ranks may and must reshard."""
        failure: Exception | None = None
        matched = None
        try:
            matched = self.match_in_place()
        except Exception as error:
            failure = error
        may_move = self.options.reshard and isinstance(failure, LayoutError)
        verdict = _FITS if failure is None else _MOVED if may_move else _FAILED
        verdicts = yield from self.talk.allgather(bytes([verdict]), PHASE)
        if any(v[0] == _FAILED for v in verdicts):
            yield from self.talk.settle(None if may_move else failure, PHASE)
        return None if any(v[0] == _MOVED for v in verdicts) else matched

    def match_in_place(self) -> Matched:
        """Match this rank's own tree with its template."""
        tree = self.ranks.tree(self.talk.rank)
        index = self.ranks.reader(self.talk.rank).index
        matcher = self.matcher(held={a.key: a.boxes for a in index.arrays}, ranks=None)
        self.require_known_patterns(tree)
        build = matcher.match(tree)
        if moved := matcher.wants.moved:
            raise LayoutError(
                f"{_listed(moved)}: the boxes that this rank wants are not "
                "those that it saved; pass reshard=True to redistribute",
                key=moved[0],
            )
        self.require_present(matcher.missing)
        if matcher.unexpected and not self.options.ignore_unexpected:
            raise _unexpected(matcher.unexpected)
        return Matched(wants=matcher.wants.wants, build=build, in_place=True)

    def anywhere(self) -> Steps[Matched]:
        """Match with the union of what all saved ranks had; boxes may differ."""
        tree = yield from self.ranks.merged(self.talk, self.own)
        if self.manifest.world_size == self.talk.size:
            # Boxes moved, ranks did not: each has its own plain values again.
            tree = overlay(self.ranks.tree(self.talk.rank), tree)
        matcher = self.matcher(held=None, ranks=self.ranks)

        def match() -> Callable[[], Any]:
            self.require_known_patterns(tree)
            build = matcher.match(tree)
            self.require_present(matcher.missing)
            self.require_resizable(matcher.conflicts)
            return build

        build = yield from self.talk.agree(match, PHASE)
        if not self.options.ignore_unexpected:
            yield from self.require_wanted(matcher.unexpected)
        return Matched(wants=matcher.wants.wants, build=build, in_place=False)

    def matcher(self, *, held: Any, ranks: SavedRanks | None) -> Matcher:
        """Return a matcher for this rank."""
        wants = WantList(
            rank=self.talk.rank,
            size=self.talk.size,
            held=held,
            saved_size=self.manifest.world_size,
            cast=self.options.rules.cast,
            budget_nbytes=self.manifest.nbytes,
        )
        return Matcher(
            template=self.template,
            rules=self.options.rules,
            wants=wants,
            ranks=ranks,
        )

    def require_known_patterns(self, tree: Node) -> None:
        """Raise if a pattern of `only` fits nothing that was saved."""
        if self.options.only is None:
            return
        known = {key for key, _ in leaves(tree)}
        known |= {array.key for array in self.manifest.arrays}
        if not any(self.options.rules.selected(key) for key in known):
            raise LayoutError(
                f"only={list(self.options.only)} fits none of the saved keys: "
                f"{_listed(sorted(known))}"
            )

    def require_present(self, missing: Sequence[str]) -> None:
        """Raise if the template has entries that were not saved."""
        if missing:
            raise LayoutError(
                f"{_listed(missing)}: in `like`, but not in the checkpoint; pass "
                "missing='keep' to leave them as they are, or rename={...}",
                key=missing[0],
            )

    def require_resizable(self, conflicts: Sequence[str]) -> None:
        """Raise if values differ between saved ranks and nobody said what to take."""
        if conflicts:
            raise WorldSizeMismatchError(
                f"saved by {self.manifest.world_size} ranks, loaded by "
                f"{self.talk.size}: {_listed(conflicts)} differ between the saved "
                "ranks; say with PerRank(x, on_resize='keep', 'first', 'modulo' or a "
                "callable) in `like` what this number of ranks shall take",
                saved=self.manifest.world_size,
                current=self.talk.size,
                keys=list(conflicts),
            )

    def require_wanted(self, unexpected: Sequence[str]) -> Steps[None]:
        """Raise if something was saved that no rank's template has."""
        size = self.talk.size
        outgoing: dict[int, list[str]] = {}
        for key in unexpected:
            outgoing.setdefault(owner_of(key, size), []).append(key)
        packed = {rank: msgspec.json.encode(keys) for rank, keys in outgoing.items()}
        arrived = yield from self.talk.exchange(packed, PHASE)
        counts = Counter(
            k for keys in arrived.values() for k in msgspec.json.decode(keys)
        )
        nowhere = sorted(key for key, count in counts.items() if count == size)
        yield from self.talk.settle(_unexpected(nowhere) if nowhere else None, PHASE)


def _unexpected(keys: Sequence[str]) -> CheckpointError:
    return LayoutError(
        f"{_listed(keys)}: in the checkpoint, but not in `like`; pass "
        "unexpected='ignore' to leave them out",
        key=keys[0],
    )


def _listed(keys: Sequence[str], most: int = 8) -> str:
    more = f" and {len(keys) - most} more" if len(keys) > most else ""
    return ", ".join(repr(key or "%root") for key in keys[:most]) + more

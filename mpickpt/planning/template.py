"""Matches a saved tree with the tree a program wants.

Nothing is read here. The answer is a list of `Want`s, whose targets others fill, and
a function that then builds the restored state around them.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from mpickpt.errors import LayoutError
from mpickpt.format.tree import (
    ArrayNode,
    AsSavedNode,
    DictNode,
    Key,
    ListNode,
    LiveNode,
    Node,
    Plain,
    RecordNode,
    SavedLeaf,
    ScopeNode,
    VariesNode,
)
from mpickpt.planning.flatten import FlatState, HeldLeaf, shown
from mpickpt.planning.live import is_generator
from mpickpt.planning.live_rules import live_rules
from mpickpt.planning.rebuild import (
    Build,
    as_it_is,
    in_dict,
    in_list,
    in_live,
    in_record,
    in_scope,
    left_out,
)
from mpickpt.planning.tree_walk import (
    Path,
    described,
    is_settled,
    leaves,
    plain_only,
)
from mpickpt.planning.wants import Place, Rules, WantList
from mpickpt.state import PerRank, Replicated

Mapped = DictNode | RecordNode


class SavedRanks(Protocol):
    """What a match may ask about single saved ranks."""

    size: int

    def node(self, rank: int, path: Path) -> Node | None:
        """Return what a saved rank had at a path."""

    def equal(self, key: str) -> bool:
        """Tell whether all saved ranks had the same per-rank value there."""

    def sequence(self, path: Path) -> Sequence[Any]:
        """Return the values of all saved ranks, read when asked for."""


class Matcher:
    """Walks a saved tree and a template side by side.

    Parameters
    ----------
    template : FlatState or None
        The flattened `like`.
    rules : Rules
        What the caller allows.
    wants : WantList
        Takes the arrays that have to be fetched.
    ranks : SavedRanks or None
        Single saved ranks, where per-rank values may come from another rank; None
        where the tree is this rank's own.

    Attributes
    ----------
    missing, unexpected : list of str
        Keys that only the template has, and that only the checkpoint has.
    conflicts : list of str
        Keys whose values differ between saved ranks, with nobody saying what to take.
    """

    def __init__(
        self,
        *,
        template: FlatState | None,
        rules: Rules,
        wants: WantList,
        ranks: SavedRanks | None,
    ) -> None:
        self.template = template
        self.rules = rules
        self.wants = wants
        self.ranks = ranks
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.conflicts: list[str] = []

    def match(self, saved: Node) -> Build:
        """Return the function that builds the restored state."""
        place = Place(source=self.wants.rank if self.ranks is None else None)
        like = None if self.template is None else self.template.tree
        return self.either(saved, like, place) or _nothing

    def either(self, saved: Node, like: Node | None, place: Place) -> Build | None:
        """Match with the template, or take what was saved where there is none."""
        if like is None or isinstance(like, AsSavedNode):
            return self.as_saved(saved, place)
        return self.node(saved, like, place)

    def node(self, saved: Node, like: Node, place: Place) -> Build:
        """Match an entry that both trees have."""
        if not self.is_selected(like, place.key):
            return self.kept(like, place)
        if isinstance(like, ScopeNode):
            return self.scope(saved, like, place)
        if isinstance(saved, ScopeNode) and saved.wrapper == "per_rank":
            return self.per_rank(saved, like, place, saved.option) or _nothing
        if isinstance(like, LiveNode):
            return self.live(saved, like, place)
        if isinstance(like, AsSavedNode):
            return self.as_saved(saved, place) or _nothing
        if isinstance(saved, ScopeNode | LiveNode):
            return self.node(saved.child, like, place)
        if isinstance(like, ArrayNode):
            return self.array(saved, self.leaf(like), place)
        if isinstance(like, Mapped):
            return self.mapping(saved, like, place)
        if isinstance(like, ListNode):
            return self.listing(saved, like, place)
        return self.replaced(saved, like, place)

    def scope(self, saved: Node, like: ScopeNode, place: Place) -> Build:
        """Match a wrapper of the template."""
        if like.wrapper == "per_rank":
            child = self.per_rank(saved, like.child, place, like.rule)
        else:
            if isinstance(saved, ScopeNode) and saved.wrapper == "replicated":
                saved = saved.child
            child = self.either(saved, like.child, place.but(scoped=True))
        return left_out if child is left_out else in_scope(like, child or _nothing)

    def per_rank(
        self, saved: Node, like: Node | None, place: Place, rule: Any
    ) -> Build | None:
        """Match values of a rank's own; the rule counts if the world was resized."""
        inner = place.but(scoped=True, per_rank=True)
        unwrapped = saved.child if isinstance(saved, ScopeNode) else saved
        if self.ranks is None:
            return self.either(unwrapped, like, inner)
        if self.ranks.size == self.wants.size:
            return self.from_rank(self.wants.rank, like, inner)
        if callable(rule):
            return self.called(rule, like, place)
        if rule == "keep" and like is not None:
            return self.kept(like, inner)
        if rule == "first":
            return self.from_rank(0, like, inner)
        if rule == "modulo":
            return self.from_rank(self.wants.rank % self.ranks.size, like, inner)
        return self.equal_values(saved, like, inner)

    def equal_values(
        self, saved: Node, like: Node | None, place: Place
    ) -> Build | None:
        """Take per-rank values that no rule tells apart: they must be equal."""
        assert self.ranks is not None
        if isinstance(saved, ScopeNode) and self.ranks.equal(place.key):
            return self.from_rank(0, like, place.but(must_agree=True))
        if not isinstance(saved, ScopeNode) and is_settled(saved):
            return self.either(saved, like, place)
        self.conflicts.append(shown(place.key))
        return _nothing

    def from_rank(self, source: int, like: Node | None, place: Place) -> Build | None:
        """Take what one saved rank had."""
        assert self.ranks is not None
        saved = self.ranks.node(source, place.path)
        if isinstance(saved, ScopeNode):
            saved = saved.child
        if saved is not None:
            return self.either(saved, like, place.but(source=source))
        return None if like is None else self.not_saved(like, place)

    def called(self, rule: Any, like: Node | None, place: Place) -> Build:
        """Take what the caller's function makes of the saved ranks' values."""
        assert self.ranks is not None
        values = self.ranks.sequence(place.path)
        rank, size = self.wants.rank, self.wants.size

        def build() -> Any:
            return rule(values, rank, size)

        return in_live(like.origin, build) if isinstance(like, LiveNode) else build

    def live(self, saved: Node, like: LiveNode, place: Place) -> Build:
        """Match an object whose state is set; a generator takes whatever was saved."""
        while isinstance(saved, ScopeNode | LiveNode):
            saved = saved.child
        rules = live_rules(like.origin)
        inner = place.but(
            loose=rules.takes_unknown,
            may_lack=rules.may_lack,
            loaded_only=rules.loaded_only,
            scoped=place.scoped or is_generator(like.origin),
        )
        template = None if is_generator(like.origin) else like.child
        return in_live(like.origin, self.either(saved, template, inner) or _nothing)

    def mapping(self, saved: Node, like: Mapped, place: Place) -> Build:
        """Match a dict or a record, key by key."""
        if not isinstance(saved, Mapped) or _fills_up(saved, like):
            return self.replaced(saved, like, place)
        theirs = dict(saved.items)
        built: dict[Key, Build] = {}
        for key, child in like.items:
            inner = place.below(key)
            built[key] = (
                self.either(theirs[key], child, inner) or _nothing
                if key in theirs
                else self.not_saved(child, inner)
            )
        for key, child in saved.items:
            extra = None if key in built else self.not_wanted(child, place.below(key))
            if extra is not None:
                built[key] = extra
        if isinstance(like, RecordNode) and like.origin is not None:
            return in_record(like.origin, built)
        return in_dict(built)

    def listing(self, saved: Node, like: ListNode, place: Place) -> Build:
        """Match a list or a tuple, item by item."""
        if not isinstance(saved, ListNode) or len(saved.items) != len(like.items):
            return self.replaced(saved, like, place)
        pairs = enumerate(zip(saved.items, like.items, strict=True))
        return in_list(
            like.form, [self.either(s, k, place.below(i)) for i, (s, k) in pairs]
        )

    def replaced(self, saved: Node, like: Node, place: Place) -> Build:
        """Take what was saved in place of plain values, or refuse."""
        if place.per_rank or place.loose or (plain_only(saved) and plain_only(like)):
            return self.as_saved(saved, place) or self.kept(like, place)
        if not is_settled(saved):
            self.conflicts.append(shown(place.key))
            return _nothing
        raise LayoutError(
            f"{shown(place.key)!r}: saved was {described(saved)}, the program has "
            f"{described(like)}; make the template the same, or put AsSaved there",
            key=shown(place.key),
        )

    def array(self, saved: Node, leaf: HeldLeaf, place: Place) -> Build:
        """Match an array of the template."""
        if isinstance(saved, SavedLeaf):
            return self.wants.in_place(saved, leaf, place)
        if not is_settled(saved):
            self.conflicts.append(shown(place.key))
            return _nothing
        raise LayoutError(
            f"{shown(place.key)!r}: saved was {described(saved)}, the program has an "
            "array; make the template the same, or put AsSaved there",
            key=shown(place.key),
        )

    def not_saved(self, like: Node, place: Place) -> Build:
        """Keep an entry that only the template has; note it unless that is allowed."""
        if not self.rules.keep_missing and not place.may_lack:
            keys = [shown(key) for key, _ in leaves(like, place.key)]
            self.missing += [key for key in keys if self.rules.selected(key)]
        return self.kept(like, place)

    def not_wanted(self, saved: Node, place: Place) -> Build | None:
        """Note an entry that only the checkpoint has; a live object gets it."""
        if place.loose:
            return self.as_saved(saved, place)
        keys = [shown(key) for key, _ in leaves(saved, place.key)]
        self.unexpected += [key for key in keys if self.rules.selected(key)]
        return None

    def kept(self, like: Node, place: Place) -> Build:
        """Leave an entry of the template as it is."""
        if place.loaded_only:
            return left_out
        assert self.template is not None
        return as_it_is(like, self.template.leaves, place.scoped)

    def as_saved(self, saved: Node, place: Place) -> Build | None:
        """Return the builder of a saved subtree, or None where nothing is selected."""
        if isinstance(saved, ScopeNode):
            return self.scope_as_saved(saved, place)
        if isinstance(saved, LiveNode):
            return self.as_saved(saved.child, place)
        if isinstance(saved, Mapped):
            pairs = [(k, self.as_saved(n, place.below(k))) for k, n in saved.items]
            built = {key: build for key, build in pairs if build is not None}
            return None if pairs and not built else in_dict(built)
        if isinstance(saved, ListNode):
            numbered = enumerate(saved.items)
            items = [self.as_saved(n, place.below(i)) for i, n in numbered]
            return None if items and not any(items) else in_list(saved.form, items)
        if not self.rules.selected(place.key):
            return None
        if isinstance(saved, SavedLeaf):
            return self.wants.as_saved(saved, place)
        if isinstance(saved, VariesNode):
            self.conflicts.append(shown(place.key))
        value = saved.value if isinstance(saved, Plain) else None
        return lambda: value

    def scope_as_saved(self, saved: ScopeNode, place: Place) -> Build | None:
        """Return the builder of a saved wrapper and what is in it."""
        if not self.is_selected(saved, place.key):
            return None
        option: Any = saved.option
        if saved.wrapper == "per_rank":
            child = self.per_rank(saved, None, place, option)
            wrap: Any = PerRank
        else:
            child = self.as_saved(saved.child, place.but(scoped=True))
            wrap = Replicated
        if child is None or place.scoped:
            return child
        return lambda: wrap(child(), option)

    def leaf(self, node: ArrayNode) -> HeldLeaf:
        """Return an array of the template."""
        assert self.template is not None
        return self.template.leaves[node.ordinal]

    def is_selected(self, node: Node, key: str) -> bool:
        """Tell whether anything at or below a node is to be loaded."""
        selected = self.rules.selected
        return selected(key) or any(selected(leaf) for leaf, _ in leaves(node, key))


def _nothing() -> None:
    return None


def _fills_up(saved: Mapped, like: Mapped) -> bool:
    """Tell whether a dict of plain values is one that grows as the program runs."""
    if isinstance(like, RecordNode) or not (plain_only(saved) and plain_only(like)):
        return False
    keys = [key for key, _ in (*saved.items, *like.items)]
    return not like.items or any(isinstance(key, int) for key in keys)

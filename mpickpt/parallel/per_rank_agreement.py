"""Agrees whether per-rank arrays that every rank takes are equal, by their digests."""

from collections import defaultdict
from collections.abc import Iterable

import msgspec

from mpickpt.errors import WorldSizeMismatchError
from mpickpt.parallel.conversation import Conversation
from mpickpt.parallel.waiting import Steps
from mpickpt.planning.layout import owner_of

PHASE = "compare"


def require_equal(
    talk: Conversation, digests: Iterable[tuple[str, str]]
) -> Steps[None]:
    """Raise, alike on every rank, unless the arrays of each key were equal.

    Parameters
    ----------
    talk : Conversation
        The ranks.
    digests : iterable of (str, str)
        Key and digest of each per-rank array that this rank has read.

    Raises
    ------
    WorldSizeMismatchError
        Arrays of one key have different digests; `keys` names all of them.
    """
    outgoing: defaultdict[int, list[tuple[str, str]]] = defaultdict(list)
    for key, digest in digests:
        outgoing[owner_of(key, talk.size)].append((key, digest))
    packed = {rank: msgspec.json.encode(rows) for rank, rows in outgoing.items()}
    arrived = yield from talk.exchange(packed, PHASE)
    seen: defaultdict[str, set[str]] = defaultdict(set)
    for rows in arrived.values():
        for key, digest in msgspec.json.decode(rows):
            seen[key].add(digest)
    differing = sorted(key for key, found in seen.items() if len(found) > 1)
    yield from talk.settle(_not_equal(differing), PHASE)


def _not_equal(keys: list[str]) -> WorldSizeMismatchError | None:
    if not keys:
        return None
    return WorldSizeMismatchError(
        f"per-rank arrays differ between the saved ranks and have on_resize='error': "
        f"{', '.join(map(repr, keys[:8]))}; say with PerRank(x, on_resize=...) in "
        "`like` what another number of ranks shall take",
        keys=keys,
    )

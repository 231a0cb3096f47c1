"""Agrees which rank sends what to whom in a load; each key is matched by its owner."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from mpickpt.parallel.conversation import Conversation
from mpickpt.parallel.waiting import Steps
from mpickpt.planning.matching import answered
from mpickpt.planning.matching_wire import (
    Answer,
    Sending,
    StoredItem,
    WantedItem,
    announcements,
    answer_of,
)

PHASE = "plan"


def route(
    talk: Conversation, stored: Iterable[StoredItem], wanted: Iterable[WantedItem]
) -> Steps[Answer]:
    """Tell the owners what is here and what is wanted; return what this rank does.

    Raises
    ------
    LayoutError
        Blocks that do not add up to the global array.
    IncompleteCheckpointError, ManifestError
        Elements that no shard holds, or that are stored twice.
    """
    announced = announcements(stored, wanted, talk.size)
    arrived = yield from talk.exchange(announced, PHASE)
    answers = yield from talk.agree(lambda: answered(arrived, talk.size), PHASE)
    arrived = yield from talk.exchange(answers, PHASE)
    return answer_of(arrived.values())


def by_number(sendings: Sequence[Sending]) -> dict[int, list[Sending]]:
    """Return the sendings of each stored item."""
    found: defaultdict[int, list[Sending]] = defaultdict(list)
    for sending in sendings:
        found[sending.number].append(sending)
    return dict(found)

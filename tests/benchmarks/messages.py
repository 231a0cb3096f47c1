"""The formula of the messages of a save and of a load; pure functions.

`Traffic` says what one rank calls: collectives by the bytes that a rank brings, and
what all ranks together send point to point. A test compares it with what is counted.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, log2

from mpickpt.planning.layout import HeldArray
from mpickpt.planning.layout_rounds import (
    answers_to_holders,
    descriptions,
    resolved_keys,
)
from tests.benchmarks.simulation import Mail, delivered

DESCRIPTION_NBYTES = 129
RECEIPT_NBYTES = 96
SECOND_DESCRIPTION_NBYTES = 24
STATUS_NBYTES = 1
LENGTH_NBYTES = 8
FIRST_NBYTES = 1024
CALL_NBYTES = 32


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What is sent in one call of the library.

    Attributes
    ----------
    allgathers, bcasts : Counter of int
        How often, by the bytes of one rank's record, or of the root's payload.
    barriers : int
        Non-blocking barriers: one ends each sparse exchange.
    messages, nbytes : int
        Point to point, of all ranks together.
    """

    allgathers: Counter[int] = field(default_factory=Counter)
    bcasts: Counter[int] = field(default_factory=Counter)
    barriers: int = 0
    messages: int = 0
    nbytes: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            allgathers=self.allgathers + other.allgathers,
            bcasts=self.bcasts + other.bcasts,
            barriers=self.barriers + other.barriers,
            messages=self.messages + other.messages,
            nbytes=self.nbytes + other.nbytes,
        )

    def received_nbytes(self, ranks: int) -> int:
        """Return the bytes that each rank receives in collectives."""
        gathered = sum(nbytes * n for nbytes, n in self.allgathers.items())
        broadcast = sum(nbytes * n for nbytes, n in self.bcasts.items())
        return gathered * (ranks - 1) + broadcast

    def rounds(self, ranks: int) -> int:
        """Return how many messages follow each other where collectives are trees."""
        calls = self.allgathers.total() + self.bcasts.total() + self.barriers
        return calls * ceil(log2(ranks)) if ranks > 1 else 0


def broadcast(nbytes: int) -> Counter[int]:
    """Return the calls of a broadcast: its first KiB with its length, then the rest."""
    rest = nbytes - (FIRST_NBYTES - LENGTH_NBYTES)
    return Counter([FIRST_NBYTES, rest] if rest > 0 else [FIRST_NBYTES])


def steady_save(beats: int = 1) -> Traffic:
    """Return the traffic of a save whose layout is that of the save before.

    Neither the number of arrays nor their bytes are in it. `beats`: heartbeats, one
    and one more for each 2 s that the slowest rank writes.
    """
    return Traffic(
        allgathers=Counter(
            {
                DESCRIPTION_NBYTES: 1,
                STATUS_NBYTES: 1 + beats,  # draft, write
                RECEIPT_NBYTES: 1,
            }
        ),
        # The answers of rank 0 to prepare and to publish.
        bcasts=Counter({FIRST_NBYTES: 2}),
    )


def new_layout(held: Sequence[Sequence[HeldArray]], rows: Mapping[int, int]) -> Traffic:
    """Return what a save adds when its layout is new.

    Parameters
    ----------
    held : sequence of sequences of HeldArray
        What each rank says of its arrays.
    rows : mapping of int to int
        Bytes of the layout document's rows, by the rank that owns them.
    """
    size = len(held)
    asked = delivered({r: descriptions(own, size) for r, own in enumerate(held)})
    answers = delivered(
        {owner: answers_to_holders(resolved_keys(m)) for owner, m in asked.items()}
    )
    return (
        Traffic(
            allgathers=Counter(
                {STATUS_NBYTES: 1, LENGTH_NBYTES: 1, SECOND_DESCRIPTION_NBYTES: 1}
            )
        )
        + exchange(asked)
        + exchange(answers)
        + exchange({0: {rank: bytes(n) for rank, n in rows.items()}})
    )


def exchange(mail: Mail) -> Traffic:
    """Return the traffic of a sparse exchange: messages to others, and a barrier."""
    sent = [
        len(message)
        for dest, messages in mail.items()
        for source, message in messages.items()
        if source != dest
    ]
    return Traffic(barriers=1, messages=len(sent), nbytes=sum(sent))


def load_in_place(manifest_nbytes: int, beats: int = 1) -> Traffic:
    """Return the traffic of a load by as many ranks with the boxes that they saved."""
    return Traffic(
        allgathers=Counter({STATUS_NBYTES: 7 + beats, CALL_NBYTES: 1}),
        bcasts=broadcast(1 + manifest_nbytes),
    )


def reshard_calls(
    manifest_nbytes: int, tree_nbytes: int, index_nbytes: int, beats: int = 1
) -> Traffic:
    """Return the collectives of a load by another number of ranks.

    Point to point there go besides: each rank's tree to rank 0; what is stored and
    what is wanted to the owners of the keys, and their answers; the boxes themselves.
    """
    return Traffic(
        allgathers=Counter(
            {STATUS_NBYTES: 13 + beats, CALL_NBYTES: 1, LENGTH_NBYTES: 1}
        ),
        bcasts=broadcast(1 + manifest_nbytes)
        + broadcast(1 + tree_nbytes)
        + broadcast(1 + index_nbytes),
        barriers=5,
    )

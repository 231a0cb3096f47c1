"""Changes JSON documents and shards as an enemy would, from a seed alone."""

import json
import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

Document = Any
Place = tuple[Any, ...]

# Values that have broken parsers of others.
NASTY: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 3, 7, 24, 2**31, 2**53 + 1, 2**62, 2**63 - 1),
    *(2**63, 2**64, -(2**63), 2**200, 10**400, 0.5, -0.0, 1e308, -1e-320),
    *("", "w", "own", "..", "../../secret", "/etc/passwd", "\ud800", "\0", "a/b"),
    *("float64", "U999999999", "S999999999", "datetime64[ns]", "bfloat16", ">f4"),
    *("float8_e4m3fn", "longdouble[ibm]", "clongdouble[x87]", "timedelta64[7as]"),
    *("per_rank", "sharded", "replicated", "%root", "%empty", "9" * 5000, "0" * 64),
    *("a" * 10_000, "é" * 300, "\x1b[2J", "nan", "-Infinity", "2026-99-99T99:99:99Z"),
    *([], {}, [[]], [0], [2**40, 2**40], [2**62, 2], [-1], [None], [1] * 65),
    *([2] * 40, [0, 2**62, 2**62], [2**31, 2**31, 0]),
    *({"$array": 0}, {"$array": 10**6}, {"$int": "f" * 5000}, {"$int": "-0x1"}),
    *({"$tuple": [{"$array": 1}]}, {"$live": ["x", 1]}, {"$varies": None}),
    *({"$record": ["x", [["a", {"$array": 0}]]]}, {"$bytes": "====", "$str": "x"}),
    *({"$dict": [[{"$int": "0x" + "f" * 5000}, 1]]}, {"$dict": [[1, 1], [True, 2]]}),
    *({"$numpy": ["U999999999", ""]}, {"$numpy": ["float64", "AAAAAAAA8D8="]}),
    *({"$per_rank": ["first", {"$array": 0}]}, {"$replicated": ["off", [1, 2]]}),
    *({"$float": "7ff0000000000000"}, {"$str": "7aCA"}, {"$complex": "0" * 32}),
    *(
        {"$numpy": ["datetime64[ns]", "AAAAAAAA8D8="]},
        {"$leaf": ["w", "x", "y", [], 0]},
    ),
    *({"$dict": [[-7, 1], ["-7", 2], ["", 3], ["%", 4]]}, {"a": {"$tuple": []}}),
)


def nested(depth: int, rng: random.Random) -> Document:
    """Return something nested so deep."""
    forms: list[Callable[[Document], Document]] = [
        lambda inner: [inner],
        lambda inner: {"a": inner},
        lambda inner: {"$tuple": [inner]},
        lambda inner: {"$dict": [[1, inner]]},
        lambda inner: {"$dict": [[inner, 1]]},
        lambda inner: {"$per_rank": ["error", inner]},
        lambda inner: {"$live": ["x", inner]},
    ]
    wrap, document = rng.choice(forms), 1
    for _ in range(depth):
        document = wrap(document)
    return document


def places(document: Document, path: Place = ()) -> Iterator[Place]:
    """Yield the path of every value in a document."""
    items: Any = ()
    if isinstance(document, dict):
        items = document.items()
    elif isinstance(document, list):
        items = enumerate(document)
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def mutated(document: Document, rng: random.Random) -> Document:
    """Return a document with one to three changes."""
    document = deepcopy(document)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        all_places = list(places(document))
        if not all_places:
            break
        _mutate(document, rng.choice(all_places), all_places, rng)
    return document


def _mutate(
    document: Document, place: Place, all_places: list[Place], rng: random.Random
) -> None:
    parent = _at(document, place[:-1])
    key = place[-1]
    old = parent[key]
    how = rng.randrange(12)
    if how < 4:
        parent[key] = deepcopy(rng.choice(NASTY))
    elif how == 4:
        del parent[key]
    elif how == 5 and isinstance(parent, list):
        parent.insert(rng.randrange(len(parent) + 1), deepcopy(old))
    elif how == 6 and len(parent) > 1:
        other = rng.choice(list(_keys(parent)))
        parent[key], parent[other] = parent[other], parent[key]
    elif how == 7:
        parent[key] = deepcopy(_at(document, rng.choice(all_places)))
    elif how == 8:
        parent[key] = nested(rng.choice((3, 98, 101, 400, 900)), rng)
    elif how == 9 and isinstance(old, list):
        parent[key] = (old or [0]) * rng.choice((2, 3, 1000))
    elif how == 10 and isinstance(parent, dict):
        parent[rng.choice(("x", "", "$", "$int", "%root", "\ud800"))] = rng.choice(
            NASTY
        )
    else:
        parent[key] = _other(old, rng)


def _other(value: Document, rng: random.Random) -> Document:
    if type(value) is int:
        return _other_int(value, rng)
    return _other_text(value, rng) if isinstance(value, str) else [value]


def _other_int(value: int, rng: random.Random) -> int:
    power = 1 << rng.randrange(64)
    return rng.choice((value + 1, value - 1, -value, value * 2, value + power, power))


def _other_text(text: str, rng: random.Random) -> str:
    place = rng.randrange(len(text) + 1)
    more = rng.choice(("/", "..", "%", "\0", "\n", "é", "\udcff", "0", "A", "\u202e"))
    shorter = text[:place] + text[place + 1 :]
    return rng.choice((text[:place] + more + text[place:], shorter, text[::-1]))


def _at(document: Document, place: Place) -> Document:
    for key in place:
        document = document[key]
    return document


def _keys(parent: Document) -> Any:
    return parent if isinstance(parent, dict) else range(len(parent))


def duplicated_key(text: str, rng: random.Random) -> str:
    """Return the text of a JSON object with one name of some object twice."""
    starts = [i for i, c in enumerate(text) if c == "{" and text[i + 1] == '"']
    start = rng.choice(starts)
    end = text.index(":", start)
    return f"{text[: start + 1]}{text[start + 1 : end]}: 0, {text[start + 1 :]}"


def garbage(text: bytes, rng: random.Random) -> bytes:
    """Return bytes that are hardly JSON any more."""
    damaged = bytearray(text)
    for _ in range(rng.choice((1, 2, 8))):
        start = rng.randrange(len(damaged))
        length = rng.choice((1, 1, 4, 50))
        kind = rng.randrange(4)
        if kind == 0:
            damaged[start : start + length] = rng.randbytes(length)
        elif kind == 1:
            del damaged[start : start + length]
        elif kind == 2:
            damaged[start:start] = damaged[start : start + length]
        else:
            tokens = (b"NaN", b"1e999", b"\xff", b"[" * 2000, b'"', b"}", b"-", b"\\u")
            damaged[start:start] = rng.choice(tokens)
        damaged = damaged or bytearray(b"{")
    return bytes(damaged)


def as_text(document: Document) -> str:
    """Return JSON, however deep it is nested."""
    try:
        return json.dumps(document)
    except RecursionError:
        return "[" * 5000

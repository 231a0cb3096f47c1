"""Reads sizes, speeds and times as people write them; pure functions."""

import math
import re
from typing import TypeVar

T = TypeVar("T", int, float)

_NUMBER = r"(?P<number>[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+)"
_SIZE = re.compile(_NUMBER + r"\s*(?P<unit>[A-Za-z]*)")
_RATE = re.compile(_NUMBER + r"\s*(?P<unit>[A-Za-z]*?)\s*(?:/s|ps)?")
_TIME = re.compile(_NUMBER + r"\s*(?P<unit>[a-z]+)\s*")

_PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_BINARY = {f"{p}i": 1024**n for n, p in enumerate(["k", "m", "g", "t", "p"], 1)}
_SECONDS = {
    "ms": 1e-3,
    "s": 1.0,
    "sec": 1.0,
    "min": 60.0,
    "m": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}


def parse_nbytes(text: str) -> int:
    """Return a number of bytes: "1TB" is 10**12, "1TiB" 2**40, "512" 512.

    Raises
    ------
    ValueError
        Anything else; the text says what is understood.
    """
    match = _SIZE.fullmatch(text.strip())
    factor = _byte_factor(match["unit"]) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is no size; write it as 1TB, 931GiB or 980e9")
    return _positive(text, round(_finite(text, match["number"]) * factor))


def parse_rate(text: str) -> float:
    """Return bytes a second: "2.5GB/s", "200MB", "100Gbit/s" (an eighth of it).

    Raises
    ------
    ValueError
        Anything else; the text says what is understood.
    """
    match = _RATE.fullmatch(text.strip())
    factor = None
    if match:
        unit = match["unit"]
        bits = re.fullmatch(r"(?i)([kmgtp]?)(?:bit|b)", unit)
        if bits and not unit.endswith("B"):
            factor = _PREFIXES[bits[1].lower()] / 8
        else:
            factor = _byte_factor(unit)
    if match is None or factor is None:
        raise ValueError(f"{text!r} is no speed; write it as 2.5GB/s or 100Gbit/s")
    return _positive(text, _finite(text, match["number"]) * factor)


def parse_seconds(text: str) -> float:
    """Return seconds: "4h", "1h30min", "250ms", "90" (seconds).

    Raises
    ------
    ValueError
        Anything else; the text says what is understood.
    """
    stripped = text.strip()
    try:
        return _positive(text, _finite(text, stripped))
    except ValueError:
        if re.fullmatch(_NUMBER, stripped):
            raise
    seconds, place = 0.0, 0
    while place < len(stripped):
        match = _TIME.match(stripped, place)
        if match is None or match["unit"] not in _SECONDS:
            raise ValueError(f"{text!r} is no time; write it as 4h, 1h30min or 90s")
        seconds += _finite(text, match["number"]) * _SECONDS[match["unit"]]
        place = match.end()
    return _positive(text, seconds)


def _byte_factor(unit: str) -> int | None:
    lower = unit.lower()
    return (_PREFIXES | _BINARY).get(lower.removesuffix("b"))


def _finite(text: str, number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is too large")
    return value


def _positive(text: str, value: T) -> T:
    if not 0 < value < math.inf:
        raise ValueError(f"{text!r} is not more than 0")
    return value

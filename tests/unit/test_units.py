import math

import pytest

from mpickpt.planning.units import parse_nbytes, parse_rate, parse_seconds


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("512", 512),
        ("980e9", 980 * 10**9),
        ("1TB", 10**12),
        ("1 tb", 10**12),
        ("1T", 10**12),
        ("1TiB", 2**40),
        ("1.5GiB", 3 * 2**29),
        (" 7B ", 7),
    ],
)
def test_sizes_are_read_as_people_write_them(text, nbytes):
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize(
    ("text", "bps"),
    [
        ("2.5GB/s", 2.5e9),
        ("200MB", 2e8),
        ("70 MB/s", 7e7),
        ("1MiB/s", 2**20),
        ("1Gbit/s", 1.25e8),
        ("100Gb/s", 1.25e10),
        ("10Gbps", 1.25e9),
        ("5e9", 5e9),
    ],
)
def test_rates_are_read_as_people_write_them(text, bps):
    assert math.isclose(parse_rate(text), bps)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("4h", 14400),
        ("1h30min", 5400),
        ("1h 30m", 5400),
        ("250ms", 0.25),
        ("90", 90),
        ("2d", 172800),
        ("1.5s", 1.5),
    ],
)
def test_times_are_read_as_people_write_them(text, seconds):
    assert math.isclose(parse_seconds(text), seconds)


@pytest.mark.parametrize("parse", [parse_nbytes, parse_rate, parse_seconds])
@pytest.mark.parametrize(
    "text",
    ["", "x", "-1", "0", "1XB", "1 2", "nan", "inf", "1e999", "1TB/h", "h", "4h5"],
)
def test_what_is_not_understood_is_named(parse, text):
    with pytest.raises(ValueError) as caught:
        parse(text)

    assert repr(text) in str(caught.value)

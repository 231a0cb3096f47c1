"""How shards should be striped over Lustre: the rules, and what users may say."""

import pytest

from mpickpt.planning.stripe_layout import (
    StripeComponent,
    StripeLayout,
    plain_layout,
    size_text,
)
from mpickpt.planning.striping import (
    PROGRESSIVE,
    RULES,
    ProgressiveStriping,
    Striping,
    complaint_about,
    difference,
    parse_striping,
    plan_striping,
    rule_for,
)

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40


@pytest.mark.parametrize(
    ("shard_nbytes", "n_ranks", "n_osts", "count", "size"),
    [
        # Up to 1 GiB: one OST has enough bandwidth for one client.
        (0, 1, 100, 1, 4 * MIB),
        (100 * KIB, 1, 100, 1, 4 * MIB),
        (GIB - 1, 1, 100, 1, 4 * MIB),
        # Up to 10 GiB: 4, while the ranks together stay below the number of OSTs.
        (GIB, 1, 100, 4, 4 * MIB),
        (GIB, 1, 3, 3, 4 * MIB),
        (5 * GIB, 25, 100, 4, 4 * MIB),
        (5 * GIB, 26, 100, 3, 4 * MIB),
        (5 * GIB, 50, 100, 2, 4 * MIB),
        (5 * GIB, 51, 100, 1, 4 * MIB),
        (5 * GIB, 100, 100, 1, 4 * MIB),
        (5 * GIB, 100_000, 100, 1, 4 * MIB),
        # Beyond: 8.
        (10 * GIB, 1, 100, 8, 16 * MIB),
        (10 * GIB, 1, 5, 5, 16 * MIB),
        (500 * GIB, 12, 100, 8, 16 * MIB),
        (500 * GIB, 64, 100, 1, 16 * MIB),
        # Over 1 TiB: 4 at least, so that one shard does not fill one OST.
        (TIB, 1000, 100, 4, 16 * MIB),
        (TIB, 1000, 2, 2, 16 * MIB),
        (TIB, 1, 100, 8, 16 * MIB),
        # An object has 16 TiB at most.
        (64 * TIB, 1000, 100, 4, 16 * MIB),
        (64 * TIB + 1, 1000, 100, 5, 16 * MIB),
        (200 * TIB, 1000, 100, 13, 16 * MIB),
        # Where nobody tells how many OSTs there are: as few as possible.
        (500 * MIB, 1, None, 1, 4 * MIB),
        (500 * GIB, 1, None, 1, 16 * MIB),
        (2 * TIB, 1, None, 4, 16 * MIB),
    ],
)
def test_rules_of_striping(shard_nbytes, n_ranks, n_osts, count, size):
    planned = plan_striping(shard_nbytes, n_ranks, n_osts)

    assert planned == Striping(count, size)
    assert f"{n_ranks} shards" in planned.reason


def test_each_rule_names_its_source_and_they_cover_all_lengths():
    limits = [rule.below for rule in RULES]

    assert all("," in rule.source for rule in RULES)
    assert limits[-1] is None and limits[:-1] == sorted(limits[:-1])
    assert all(1 <= rule.least <= rule.most <= 8 for rule in RULES)
    assert all(4 * MIB <= rule.size <= 16 * MIB for rule in RULES)
    assert rule_for(10**18) is RULES[-1]


AZURE = StripeLayout(
    components=(
        StripeComponent(end=GIB, count=1, size=MIB),
        StripeComponent(start=GIB, end=100 * GIB, count=5, size=MIB),
        StripeComponent(start=100 * GIB, end=500 * GIB, count=10, size=MIB),
        StripeComponent(start=500 * GIB, count=-1, size=MIB),
    ),
    is_composite=True,
)


@pytest.mark.parametrize(
    ("layout", "shard_nbytes", "n_ranks", "n_osts", "word"),
    [
        (plain_layout(-1, MIB), MIB, 64, None, "all OSTs"),
        (plain_layout(-1, MIB), 100 * GIB, 2, 300, "all OSTs"),
        (plain_layout(72, MIB), GIB, 64, 248, "72 OSTs"),
        (plain_layout(5, MIB), 10 * MIB, 64, None, "5 OSTs"),
        (AZURE, 600 * GIB, 64, None, "all OSTs"),
        (plain_layout(1, MIB), MIB, 64, None, None),
        (plain_layout(4, MIB), MIB, 64, None, None),
        (plain_layout(8, MIB), 2 * GIB, 64, None, None),
        (AZURE, GIB, 64, None, None),
        (AZURE, 90 * GIB, 64, None, None),
        # Alone, a rank meets no other.
        (plain_layout(-1, MIB), 100 * GIB, 1, None, None),
        (plain_layout(-1, MIB), 100 * GIB, 64, 1, None),
        (StripeLayout(components=(), is_composite=True), GIB, 64, None, None),
    ],
)
def test_complaint_about_layouts_bad_for_one_file_per_rank(
    layout, shard_nbytes, n_ranks, n_osts, word
):
    complaint = complaint_about(
        layout, shard_nbytes=shard_nbytes, n_ranks=n_ranks, n_osts=n_osts
    )

    assert (complaint is None) if word is None else (word in complaint)


@pytest.mark.parametrize(
    ("text", "wish"),
    [
        ("site", "site"),
        ("auto", "auto"),
        (" auto ", "auto"),
        ("pfl", PROGRESSIVE),
        ("count=4", Striping(4)),
        ("count=-1,size=1MiB", Striping(-1, MIB)),
        ("count=4,size=16MiB,pool=flash", Striping(4, 16 * MIB, "flash")),
        ("pool = flash , count = 2", Striping(2, pool="flash")),
        (Striping(3), Striping(3)),
        (PROGRESSIVE, PROGRESSIVE),
    ],
)
def test_parse_striping_understands(text, wish):
    assert parse_striping(text) == wish


@pytest.mark.parametrize(
    "text",
    [
        *("", "wide", "8", "count", "count=", "count=four", "size=1MiB", "count=4,"),
        *("count=4,count=5", "count=4,start=1", "count=4;size=1MiB", "Site"),
        *("count=0", "count=-2", "count=2001", "count=1,size=1MB", "count=1,size=0"),
        *("count=1,size=4GiB", "count=1,size=nonsense", "count=1,size=1"),
        *("count=1,pool=", "count=1,pool=fs.flash", "count=1,pool=-x"),
        *("count=1,pool=a/b", "count=1,pool=sixteen_letters_", "count=1,pool=é"),
    ],
)
def test_parse_striping_refuses_nonsense(text):
    with pytest.raises(ValueError):
        parse_striping(text)


@pytest.mark.parametrize("value", [None, 4, 1.5, b"auto", ["auto"], {"count": 1}])
def test_parse_striping_refuses_other_kinds(value):
    with pytest.raises(TypeError, match="striping"):
        parse_striping(value)


@pytest.mark.parametrize(
    "arguments", [("4",), (True,), (4, "4M"), (4, 2.0), (4, MIB, 5), (4, True)]
)
def test_striping_refuses_other_kinds(arguments):
    with pytest.raises(TypeError):
        Striping(*arguments)


@pytest.mark.parametrize(
    "components",
    [
        (),
        (StripeComponent(end=GIB, count=1, size=MIB),),
        (StripeComponent(start=GIB, count=1, size=MIB),),
        (
            StripeComponent(end=GIB, count=1, size=MIB),
            StripeComponent(start=2 * GIB, count=1, size=MIB),
        ),
        (
            StripeComponent(end=1000, count=1, size=MIB),
            StripeComponent(start=1000, count=1, size=MIB),
        ),
        (
            StripeComponent(count=1, size=MIB),
            StripeComponent(start=GIB, count=1, size=MIB),
        ),
        (StripeComponent(count=0, size=MIB),),
    ],
)
def test_progressive_striping_refuses_ranges_that_do_not_tile(components):
    with pytest.raises(ValueError):
        ProgressiveStriping(components=components)


@pytest.mark.parametrize(
    ("layout", "wanted", "expected"),
    [
        (plain_layout(4, MIB), Striping(4, MIB), None),
        (plain_layout(4, MIB, "flash"), Striping(4, MIB), None),
        (plain_layout(4, MIB, "flash"), Striping(4, MIB, "flash"), None),
        (plain_layout(4, MIB), Striping(4, MIB, "flash"), "4 stripes of 1 MiB"),
        (plain_layout(2, MIB), Striping(4, MIB), "2 stripes of 1 MiB"),
        (plain_layout(1, 4 * MIB), Striping(1, MIB), "1 stripe of 4 MiB"),
        (AZURE, Striping(1, MIB), "from 1 GiB"),
        (PROGRESSIVE.layout, PROGRESSIVE, None),
        (None, Striping(1), "cannot be read"),
        (StripeLayout(components=(), is_composite=True), PROGRESSIVE, "cannot be read"),
    ],
)
def test_difference_says_what_a_layout_has_instead(layout, wanted, expected):
    found = difference(layout, wanted)

    assert (found is None) if expected is None else (expected in found)


def test_layouts_in_words():
    texts = [
        str(plain_layout(1, 4 * MIB)),
        str(plain_layout(-1, 64 * KIB, "flash")),
        str(PROGRESSIVE),
        str(StripeLayout(components=(), is_composite=True)),
    ]

    assert texts == [
        "1 stripe of 4 MiB",
        "all OSTs in stripes of 64 KiB in pool flash",
        "1 stripe of 4 MiB, 4 stripes of 16 MiB from 1 GiB",
        "a composite layout that only `lfs` can read",
    ]
    assert size_text(100) == "100 bytes"
    assert size_text(0) == "0 bytes"


def test_layout_counts_the_osts_that_a_file_of_some_length_comes_to():
    lengths = [0, 1, GIB, GIB + 1, 100 * GIB + 1, 501 * GIB, None]

    assert [AZURE.count_of(n) for n in lengths] == [1, 1, 1, 5, 10, -1, -1]
    assert AZURE.count == -1 and AZURE.size == MIB

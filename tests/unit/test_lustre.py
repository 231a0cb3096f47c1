"""Layouts of Lustre: what is set, what is read, and what `lfs` prints."""

import errno
import os
from pathlib import Path

import pytest

from mpickpt.planning.stripe_layout import (
    StripeComponent,
    StripeLayout,
    plain_layout,
)
from mpickpt.planning.striping import PROGRESSIVE, Striping
from mpickpt.storage import lustre, site_command
from mpickpt.storage.lustre import (
    LAYOUT_ATTRIBUTE,
    OstSpace,
    apply,
    inherited_layout,
    layout_attribute,
    osts,
    parse_attribute,
    parse_df,
    parse_getstripe,
    setstripe_command,
)
from tests.lustre_like.layout_bytes import Plain, of_file, pack_composite
from tests.lustre_like.standin import N_OSTS, lustre_like, why_not

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PRINTED = Path(__file__).parents[1] / "lustre_like/printed"
COMPOSITE = pack_composite(
    [
        Plain(count=1, size=4 * MIB, end=GIB),
        Plain(count=4, size=16 * MIB, start=GIB),
    ]
)


@pytest.mark.parametrize(
    ("striping", "expected"),
    [
        (
            Striping(4, 16 * MIB),
            "d00bd10b 01000000 0000000000000000 0000000000000000 00000001 0400 ffff",
        ),
        (
            Striping(-1, 64 * KIB),
            "d00bd10b 01000000 0000000000000000 0000000000000000 00000100 ffff ffff",
        ),
        (
            Striping(1, 4 * MIB, "flash"),
            "d00bd30b 01000000 0000000000000000 0000000000000000 00004000 0100 ffff"
            "666c617368 0000000000000000000000",
        ),
    ],
)
def test_attribute_is_the_struct_of_lustre_user_h(striping, expected):
    value = layout_attribute(striping)

    assert value == bytes.fromhex(expected)
    pool = striping.pool or ""
    assert value == Plain(count=striping.count, size=striping.size, pool=pool).pack()


@pytest.mark.parametrize(
    ("striping", "options"),
    [
        (Striping(4, 16 * MIB), "-c 4 -S 16M"),
        (Striping(-1), "-c -1 -S 4M"),
        (Striping(1, 64 * KIB), "-c 1 -S 64K"),
        (Striping(1, GIB), "-c 1 -S 1G"),
        (Striping(1, 1088 * KIB), "-c 1 -S 1088K"),
        (Striping(2, MIB, "flash"), "-c 2 -S 1M -p flash"),
        (PROGRESSIVE, "-E 1G -c 1 -S 4M -E eof -c 4 -S 16M"),
    ],
)
def test_setstripe_is_given_count_size_pool_and_components(tmp_path, striping, options):
    command = setstripe_command(tmp_path, striping)

    assert command == ["lfs", "setstripe", *options.split(), str(tmp_path)]


@pytest.mark.parametrize(
    ("value", "layout"),
    [
        (Plain(count=4, size=MIB).pack(), plain_layout(4, MIB)),
        (Plain(count=-1, size=MIB).pack(), plain_layout(-1, MIB)),
        (Plain(count=2, size=MIB, pool="p").pack(), plain_layout(2, MIB, "p")),
        (
            Plain(count=1, size=MIB, pool=15 * "x").pack(),
            plain_layout(1, MIB, 15 * "x"),
        ),
        (of_file(Plain(count=3, size=MIB).pack(), 8), plain_layout(3, MIB)),
        (
            of_file(Plain(count=3, size=MIB, pool="p").pack(), 8),
            plain_layout(3, MIB, "p"),
        ),
        (COMPOSITE, StripeLayout(components=(), is_composite=True)),
        # The file system's default, in part.
        (Plain(count=0, size=MIB).pack(), None),
        (Plain(count=1, size=0).pack(), None),
        # Nothing of ours.
        (b"", None),
        (b"\xd0", None),
        (Plain(count=1, size=MIB).pack()[:31], None),
        (b"\xd0\x0b\xd7\x0b" + bytes(60), None),
        (bytes(32), None),
        (os.urandom(3), None),
    ],
)
def test_attribute_is_read(value, layout):
    assert parse_attribute(value) == layout


DIRECTORY = (
    "stripe_count:  2 stripe_size:   4194304 pattern:       0 stripe_offset: -1\n"
)
POOLED = (
    "stripe_count:  -1 stripe_size:   1048576 pattern:       raid0 stripe_offset: -1 "
    "pool:          flash\n\n"
)
YAML = (
    "stripe_count:  3\nstripe_size:   65536\npattern:       raid0\nstripe_offset: -1\n"
)


def printed(name):
    """Return what `lfs` of 2.10 to 2.15 prints."""
    return (PRINTED / f"{name}.txt").read_text()


def composite(*parts):
    components = tuple(
        StripeComponent(start=start, end=end, count=count, size=size)
        for start, end, count, size in parts
    )
    return StripeLayout(components=components, is_composite=True)


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        (DIRECTORY, plain_layout(2, 4 * MIB)),
        (POOLED, plain_layout(-1, MIB, "flash")),
        (YAML, plain_layout(3, 64 * KIB)),
        (printed("file"), plain_layout(2, MIB, "disk")),
        (
            printed("directory_on_metadata"),
            composite((0, 65536, 0, 65536), (65536, None, -1, MIB)),
        ),
        (printed("directory_extending"), composite((0, 64 * MIB, 1, 4 * MIB))),
        (
            printed("composite_file"),
            composite((0, 4 * MIB, 2, 4 * MIB), (4 * MIB, None, 1, MIB)),
        ),
        ("", None),
        ("dir has no stripe info\n", None),
        ("stripe_count:  many stripe_size:   4194304\n", None),
        ("stripe_count:  1 stripe_size:   0\n", None),
        ("stripe_count:  -7 stripe_size:   65536\n", None),
        ("stripe_count:  1\n", None),
        ("\0\xff lcm_entry_count: 2 lcme_extent.e_start: x", None),
    ],
)
def test_getstripe_is_read(text, layout):
    assert parse_getstripe(text) == layout


def test_df_is_read():
    found = parse_df(printed("df"))

    assert found == (
        OstSpace(index=0, free_nbytes=524063436 << 10, total_nbytes=529449792 << 10),
        OstSpace(index=10, free_nbytes=0, total_nbytes=529449792 << 10),
    )
    assert parse_df("") == parse_df("lfs: error") == ()


# From here on against what stands for Lustre and for its `lfs`.


@pytest.fixture(scope="module")
def mounted(tmp_path_factory):
    if reason := why_not():
        pytest.skip(reason)
    with lustre_like(tmp_path_factory.mktemp("lustre") / "stand-in") as stand_in:
        yield stand_in


@pytest.fixture
def stand_in(mounted, tmp_path, monkeypatch):
    mounted.settle()
    monkeypatch.setattr(lustre, "_composites", {})
    monkeypatch.setattr(site_command, "_hung", {})
    monkeypatch.setenv("PATH", os.environ["PATH"])
    return mounted


@pytest.fixture
def directory(stand_in, tmp_path):
    made = stand_in.point / tmp_path.name
    made.mkdir()
    stand_in.forget_operations()
    return made


@pytest.fixture
def lfs(stand_in, monkeypatch):
    """Install an `lfs` that works, fails or hangs."""

    def install(behaviour):
        folder = stand_in.install_lfs(behaviour)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    return install


STRIPINGS = [Striping(4, 16 * MIB), Striping(-1), Striping(2, MIB, "flash")]


@pytest.mark.parametrize("striping", [*STRIPINGS, PROGRESSIVE], ids=str)
def test_lfs_sets_a_layout_that_new_files_inherit(stand_in, directory, lfs, striping):
    lfs("works")

    refusal = apply(directory, striping)

    assert refusal is None
    assert stand_in.lfs_calls() == [setstripe_command(directory, striping)[1:]]
    assert inherited_layout(directory) == striping.layout
    (directory / "ranks00000").mkdir()
    for path in (directory / "shard", directory / "ranks00000" / "shard"):
        path.write_bytes(b"x")
        found = inherited_layout(path)
        counts = [part.count for part in found.components]
        wanted = [part.count for part in striping.layout.components]
        assert counts == [N_OSTS if count == -1 else count for count in wanted]
        assert found.size == striping.layout.size


@pytest.mark.parametrize("striping", STRIPINGS, ids=str)
def test_without_lfs_the_attribute_is_set_and_read_back(stand_in, directory, striping):
    refusal = apply(directory, striping)

    assert refusal is None
    assert os.getxattr(directory, LAYOUT_ATTRIBUTE) == layout_attribute(striping)
    assert inherited_layout(directory) == striping.layout
    assert stand_in.operations() == [("setxattr", directory)]


def test_without_lfs_a_composite_layout_is_neither_set_nor_read(stand_in, directory):
    refusal = apply(directory, PROGRESSIVE)
    stand_in.set_layout(directory, COMPOSITE)
    found = inherited_layout(directory)

    assert "takes `lfs`" in refusal
    assert found == StripeLayout(components=(), is_composite=True)
    assert not found.is_known and found.size is None and found.count is None


def test_a_composite_layout_is_read_by_lfs_once(stand_in, directory, lfs):
    lfs("works")
    stand_in.set_layout(directory, COMPOSITE)

    found = [inherited_layout(directory) for _ in range(3)]

    assert found == 3 * [PROGRESSIVE.layout]
    assert stand_in.lfs_calls() == [["getstripe", "-d", str(directory)]]


@pytest.mark.parametrize("error", ["EPERM", "EOPNOTSUPP"])
def test_a_refused_attribute_is_told(stand_in, directory, error):
    stand_in.settle(refusal=error)

    refusal = apply(directory, Striping(4))

    assert "no `lfs`" in refusal and "lustre.lov" in refusal
    assert os.strerror(getattr(errno, error)) in refusal
    assert inherited_layout(directory) is None


@pytest.mark.parametrize("behaviour", ["works", "fails"])
def test_a_refusal_by_lfs_is_not_gone_around(stand_in, directory, lfs, behaviour):
    lfs(behaviour)
    if behaviour == "works":
        stand_in.settle(refusal="EPERM")

    refusal = apply(directory, Striping(4))

    assert "`lfs setstripe` fails" in refusal
    by_lfs = [("setxattr", directory)] if behaviour == "works" else []
    assert stand_in.operations() == by_lfs


def test_lfs_that_hangs_is_given_up(stand_in, directory, lfs, monkeypatch):
    lfs("hangs")
    monkeypatch.setattr(lustre, "_TIMEOUT_S", 0.2)

    refusal = apply(directory, Striping(4))

    assert refusal is None
    assert inherited_layout(directory) == Striping(4).layout
    assert osts(directory) == ()


def test_a_file_with_data_keeps_its_layout_whatever_is_reported(stand_in, directory):
    stand_in.set_layout(directory, Plain(count=1, size=MIB).pack())
    shard = directory / "shard"
    shard.write_bytes(b"x")

    refusal = apply(shard, Striping(4))

    assert refusal is None
    assert inherited_layout(shard) == plain_layout(1, MIB)


def test_a_directory_without_a_layout_has_that_of_the_root(stand_in, directory):
    stand_in.set_layout(stand_in.point, Plain(count=3, size=MIB).pack())

    assert inherited_layout(directory) == plain_layout(3, MIB)


def test_where_no_attribute_tells_lfs_is_asked(stand_in, directory, lfs):
    nobody = inherited_layout(directory)
    lfs("works")
    told = inherited_layout(directory)

    assert nobody is None
    assert told == plain_layout(1, MIB)


def test_storage_targets_are_those_of_lfs_df(stand_in, directory, lfs):
    without = osts(directory)
    lfs("works")
    found = osts(directory)
    osts(directory, "flash")

    assert without == ()
    assert [each.index for each in found] == list(range(N_OSTS))
    assert all(0 < each.free_nbytes < each.total_nbytes for each in found)
    assert stand_in.lfs_calls() == [
        ["df", "-l", str(directory)],
        ["df", "-l", "-p", "flash", str(directory)],
    ]


def test_a_directory_that_is_gone_is_no_error(stand_in, directory):
    directory.rmdir()

    assert inherited_layout(directory) is None
    assert "No such file" in apply(directory, Striping(1))

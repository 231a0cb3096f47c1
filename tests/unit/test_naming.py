"""Names of files, directories and keys."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mpickpt.format import naming
from mpickpt.format.naming import ShardName, key_from_user, key_of, parse_key

ID = "3f2a91c0" + "0" * 24
TEXT = st.text(st.characters() | st.sampled_from("%/.-019Ae\x00\ud800\udfff"))
PATHS = st.lists(TEXT | st.integers(), max_size=4).map(tuple)


@given(st.integers(0, 2**63 - 1))
def test_step_directory_parses_back(step):
    assert naming.parse_step_directory(naming.step_directory_name(step)) == step


def test_step_directory_is_padded_to_ten_digits():
    assert naming.step_directory_name(1234) == "step-0000001234"
    assert naming.step_directory_name(12345678901) == "step-12345678901"


@pytest.mark.parametrize(
    "name",
    ["step-123", "step-00000001234", "step--000000001", "step-000000123a", "step-"]
    + ["step-0000001234\n", "step-٠٠٠٠٠٠١٢٣٤", "step-0000001234.rejected-3f2a91c0"],
)
def test_step_directory_refuses_what_it_would_not_write(name):
    assert naming.parse_step_directory(name) is None


def test_rejected_directory_parses_back():
    name = naming.rejected_directory_name(1300, "7c01aa42")

    assert name == "step-0000001300.rejected-7c01aa42"
    assert naming.parse_rejected_directory(name) == (1300, "7c01aa42")
    assert naming.parse_rejected_directory(name.upper()) is None


@pytest.mark.parametrize(
    "directory", ["step-0000001300", "step-0000001300.rejected-7c01aa42"]
)
def test_document_about_a_checkpoint_parses_back(directory):
    assert naming.parse_document_name(naming.document_name(directory)) == directory
    assert naming.parse_document_name(directory) is None
    assert naming.parse_document_name(f"{directory}.json.1f.tmp") is None
    assert naming.parse_document_name("step-1.json") is None


def test_copy_mark_and_temporaries_of_copiers_are_the_librarys():
    id8 = "3f2a91c0"
    mark = naming.copy_mark_name(id8 * 4)
    finals = ["manifest.json", f"rank00003-{id8}.h5", "layout-0123456789abcdef.h5"]
    temporaries = [naming.temporary_name(name, "7c010000") for name in finals]

    assert naming.parse_copy_mark_name(mark) == id8
    assert [*map(naming.parse_temporary_name, temporaries)] == finals
    assert {*map(naming.parse_temporary_token, temporaries)} == {"7c010000"}
    assert all(map(naming.is_own_file, [mark, *temporaries]))
    assert naming.parse_shard_name(temporaries[1]) == naming.ShardName(3, id8, True)
    assert naming.parse_shard_path(temporaries[1]) is None
    for foreign in ("copying-3f2a91c.json", "manifest.json", "notes.txt.7c010000.tmp"):
        assert naming.parse_copy_mark_name(foreign) is None
        assert not naming.is_own_file(foreign)


def test_lease_and_sub_directory_parse_back():
    assert naming.parse_lease_name(naming.lease_name(7)) == 7
    assert naming.parse_lease_name("7.json") is None
    names = naming.shard_subdirectories(2001)
    assert list(map(naming.parse_shard_subdirectory, names)) == [0, 1, 2]
    assert naming.parse_shard_subdirectory("ranks1") is None


@pytest.mark.parametrize(
    ("rank", "world_size", "path"),
    [
        (3, 4, "rank00003-3f2a91c0.h5"),
        (999, 1000, "rank00999-3f2a91c0.h5"),
        (0, 1001, "ranks00000/rank00000-3f2a91c0.h5"),
        (2345, 65536, "ranks00002/rank02345-3f2a91c0.h5"),
        (123456, 200000, "ranks00123/rank123456-3f2a91c0.h5"),
    ],
)
def test_shard_path_parses_back(rank, world_size, path):
    assert naming.shard_path(rank, world_size, ID) == path
    assert naming.parse_shard_path(path) == ShardName(rank, "3f2a91c0")


@pytest.mark.parametrize(
    "path",
    ["/rank00003-3f2a91c0.h5", "../rank00003-3f2a91c0.h5", "rank3-3f2a91c0.h5"]
    + ["ranks00001/rank00003-3f2a91c0.h5", "rank000003-3f2a91c0.h5", "", "/"]
    + ["rank00003-3f2a91c0.h5.tmp", "rank00003-3F2A91C0.h5", "rank00003-3f2a91c0.h5\n"]
    + ["ranks00000/../rank00003-3f2a91c0.h5", "rank" + "9" * 5000 + "-3f2a91c0.h5"],
)
def test_shard_path_refuses_what_it_would_not_write(path):
    assert naming.parse_shard_path(path) is None


def test_shard_name_tells_a_temporary_file():
    name = naming.parse_shard_name("rank00003-3f2a91c0.h5.tmp")

    assert name == ShardName(3, "3f2a91c0", is_temporary=True)


@pytest.mark.parametrize(("world_size", "count"), [(1000, 0), (1001, 2), (65536, 66)])
def test_shard_subdirectories_hold_every_shard(world_size, count):
    directories = naming.shard_subdirectories(world_size)

    last = naming.shard_path(world_size - 1, world_size, ID)
    assert len(directories) == count
    assert last.rpartition("/")[0] == (directories[-1] if directories else "")


def test_receipts_and_layout_names_parse_back():
    assert naming.receipts_name(ID) == "receipts-3f2a91c0.json"
    assert naming.parse_receipts_name("receipts-3f2a91c0.json") == "3f2a91c0"
    assert naming.layout_name("9be1" * 16) == "layout-9be19be19be19be1.h5"
    assert naming.parse_layout_name("layout-9be19be19be19be1.h5") == "9be1" * 4
    assert naming.parse_layout_name("layout-9be1.h5") is None


@given(PATHS)
@example(())
@example(("",))
@example(("%root",))
@example(("%empty", "", "%"))
@example((1, "1", -1, "-1", "01", "-0", "-", 0))
@example((".", "..", "...", ".a", "\ud83d\ude00", "😀"))
def test_key_parses_back_to_its_path(path):
    parsed = parse_key(key_of(path))

    assert parsed == path
    assert list(map(type, parsed)) == list(map(type, path))


@given(PATHS)
def test_key_is_a_name_that_hdf5_and_utf8_can_hold(path):
    key = key_of(path)

    key.encode("utf-8")
    assert not any(ord(character) < 0x20 or character == "\x7f" for character in key)
    assert not {"", ".", ".."} & set(key.split("/"))


@given(PATHS)
def test_key_never_takes_a_name_of_the_library(path):
    components = set(key_of(path).split("/"))

    assert not components & {naming.LIBRARY_GROUP, naming.piece_name(0)}


@pytest.mark.parametrize(
    ("path", "key"),
    [
        (("model", "w"), "model/w"),
        (("layers", 0, "0"), "layers/0/%30"),
        (("a/b", "100%"), "a%2Fb/100%25"),
        ((".", "..x", "é"), "%2E/..x/é"),
        (("-5", "\x00\ud800"), "%2D5/%00%ED%A0%80"),
        ((), "%root"),
        (("",), "%empty"),
    ],
)
def test_key_is_written_as_specified(path, key):
    assert key_of(path) == key


@pytest.mark.parametrize(
    "key",
    ["", "/a", "a/", "a//b", "%", "%2", "%zz", "%2f", "%41", "007", "-0", ".", ".."]
    + ["%mpickpt", "%piece0", "a\x00", "\ud800", "%FF", "%C3", "a/%root", "9" * 9999],
)
def test_parse_key_refuses_what_key_of_would_not_write(key):
    with pytest.raises(ValueError):
        parse_key(key)


@given(st.text(st.characters() | st.sampled_from("%/.0129afAF"), max_size=12))
def test_parse_key_accepts_canonical_keys_only(text):
    try:
        path = parse_key(text)
    except ValueError:
        return

    assert key_of(path) == text


@pytest.mark.parametrize(
    ("typed", "key"),
    [("model/w", "model/w"), ("/model/w/", "model/w"), ("100%", "100%25")]
    + [("a%2fb", "a%2Fb"), ("%41", "A"), ("007", "%3007"), ("%root", "%root")],
)
def test_key_from_user_is_lenient(typed, key):
    assert key_from_user(typed) == key


@given(PATHS.map(key_of))
def test_key_from_user_keeps_a_canonical_key(key):
    assert key_from_user(key) == key


@pytest.mark.parametrize("typed", ["", "/", "a//b", "%FF"])
def test_key_from_user_refuses_what_has_no_meaning(typed):
    with pytest.raises(ValueError):
        key_from_user(typed)

"""What a load refuses, alike on every rank: another world, damage, other calls."""

import shutil

import numpy as np
import pytest

from mpickpt import (
    AsSaved,
    CallMismatchError,
    CheckpointNotFoundError,
    CorruptShardError,
    IncompleteCheckpointError,
    LayoutError,
    PerRank,
    Replicated,
    StateTypeError,
    WorldSizeMismatchError,
    load_sharded,
    read_manifest,
    save_sharded,
)
from tests.small_model import (
    SIZE,
    block,
    changed,
    flip_byte,
    load,
    load_failure,
    model,
    save,
)
from tests.states import (
    failure_on_ranks,
    image_of,
)


@pytest.fixture
def saved(tmp_path):
    save(tmp_path / "c", model)
    return tmp_path / "c"


@pytest.mark.parametrize("option", ["verify", "missing", "unexpected"])
def test_unknown_option_is_refused(saved, option):
    failure = load_failure(saved, **{option: "mabye"})

    assert isinstance(failure, ValueError)
    assert "mabye" in str(failure)


@pytest.mark.parametrize("options", [{}, {"expected_world_size": 3, "reshard": True}])
def test_other_world_size_is_refused_before_any_shard_is_opened(saved, options):
    for shard in saved.glob("*.h5"):
        shard.unlink()

    failure = load_failure(saved, size=3, **options)

    assert isinstance(failure, WorldSizeMismatchError)
    assert (failure.saved, failure.current) == (2, 3)


def test_expected_world_size_lets_the_right_one_through(saved):
    loaded = load(saved, size=3, expected_world_size=2, reshard=True)

    assert [tree["lr"] for tree in loaded] == [0.5] * 3


def test_missing_shard_is_refused(saved):
    (saved / read_manifest(saved).shards[1].path).unlink()

    failure = load_failure(saved)

    assert isinstance(failure, IncompleteCheckpointError)


def test_absent_checkpoint_is_refused_with_its_path(tmp_path):
    failure = load_failure(tmp_path / "absent")

    assert isinstance(failure, CheckpointNotFoundError)
    assert str(tmp_path / "absent") in str(failure)


@pytest.mark.parametrize("verify", ["sha256", "crc32"])
@pytest.mark.parametrize("size", [SIZE, 3])
def test_verify_finds_a_flipped_bit(tmp_path, verify, size):
    content = b"the bytes of an array"
    save(
        tmp_path / "c",
        lambda rank: {"x": Replicated(np.frombuffer(content, np.uint8))},
    )
    flip_byte(tmp_path / "c", content)

    failure = load_failure(tmp_path / "c", size=size, verify=verify, reshard=True)

    assert isinstance(failure, CorruptShardError)
    assert failure.path is not None


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_verify_none_reads_what_is_there(tmp_path, monkeypatch, how):
    content = b"the bytes of an array"
    save_sharded({"x": np.frombuffer(content, np.uint8)}, tmp_path / "c", step=1)
    flip_byte(tmp_path / "c", content)
    if how == "environment":
        monkeypatch.setenv("MPICKPT_VERIFY", "none")

    loaded = load_sharded(tmp_path / "c", verify="none" if how == "argument" else None)

    assert loaded["x"].tobytes() == bytes([content[0] ^ 1]) + content[1:]


@pytest.mark.parametrize("verify", ["sha256", "crc32", "none"])
@pytest.mark.parametrize("size", [SIZE, 3])
def test_every_way_to_verify_gives_the_same_state(saved, verify, size):
    loaded = load(saved, size=size, verify=verify, reshard=True)

    assert image_of(loaded) == image_of([model(rank, size) for rank in range(size)])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("path", None),
        ("verify", "md5"),
        ("only", 5),
        ("only", [5]),
        ("rename", 5),
        ("rename", {"a": 5}),
        ("missing", "ignore"),
        ("unexpected", "keep"),
    ],
)
def test_wrong_argument_on_one_rank_is_the_same_error_on_all(saved, option, value):
    def load_one(comm):
        given = {"path": saved, "comm": comm}
        load_sharded(**given | ({option: value} if comm.rank == 1 else {}))

    failure = failure_on_ranks(SIZE, load_one)

    assert isinstance(failure, TypeError | ValueError)
    assert failure.rank == 1


@pytest.mark.parametrize(
    "option", ["path", "reshard", "verify", "rename", "expected_world_size"]
)
def test_load_with_other_arguments_than_rank_0_is_refused(saved, tmp_path, option):
    shutil.copytree(saved, tmp_path / "other")
    other = {
        "path": tmp_path / "other",
        "reshard": True,
        "verify": "crc32",
        "rename": {"a": "b"},
        "expected_world_size": SIZE + 1,
    }

    def load_one(comm):
        own = {option: other[option]} if comm.rank == 1 else {}
        load_sharded(**{"path": saved, "comm": comm} | own)

    failure = failure_on_ranks(SIZE, load_one)

    assert isinstance(failure, CallMismatchError)
    assert option in str(failure)


def test_bare_array_in_like_is_refused_on_several_ranks(saved):
    failure = load_failure(saved, lambda rank: changed(model(rank), lr=np.ones(1)))

    assert isinstance(failure, StateTypeError)
    assert failure.key == "lr"


@pytest.mark.parametrize("size", [SIZE, 3])
def test_other_dtype_is_refused_with_its_key(saved, size):
    def like_of(rank):
        tree = model(rank, size)
        tree["model"]["w"] = block(rank, size, dtype=np.float32)
        return tree

    failure = load_failure(saved, like_of, size=size, reshard=True)

    assert isinstance(failure, LayoutError)
    assert failure.key == "model/w"
    for word in ("model/w", "float64", "float32", "cast=True"):
        assert word in str(failure)


@pytest.mark.parametrize("size", [SIZE, 3])
@pytest.mark.parametrize(
    ("entry", "wanted"),
    [
        ("scale", Replicated({"scale": np.zeros(4, int), "bias": np.zeros(2, int)})),
        ("scale", Replicated({"scale": 1, "bias": np.zeros(2, int)})),
        ("scale", {"scale": PerRank(np.zeros(3, int)), "bias": AsSaved}),
    ],
    ids=["shape", "array for plain", "kind"],
)
def test_entry_of_another_form_is_refused_with_its_key(saved, entry, wanted, size):
    def like_of(rank):
        tree = model(rank, size)
        tree["model"]["norm"] = wanted
        return tree

    failure = load_failure(saved, like_of, size=size, reshard=True)

    assert isinstance(failure, LayoutError)
    assert failure.key == f"model/norm/{entry}"
    assert f"model/norm/{entry}" in str(failure)


def test_list_of_arrays_of_another_length_is_refused_with_its_key(tmp_path):
    layers = [Replicated(np.full(2, i)) for i in range(3)]
    save(tmp_path / "c", lambda rank: {"layers": layers})

    failure = load_failure(tmp_path / "c", lambda rank: {"layers": layers[:2]})

    assert isinstance(failure, LayoutError)
    assert failure.key == "layers"
    assert "list of 3" in str(failure)
    assert "list of 2" in str(failure)


def test_plain_value_where_the_program_has_an_array_is_refused(saved):
    failure = load_failure(
        saved, lambda rank: changed(model(rank), lr=Replicated(np.ones(1)))
    )

    assert isinstance(failure, LayoutError)
    assert failure.key == "lr"


def test_read_only_array_in_like_is_refused_with_its_key(saved):
    def like_of(rank):
        tree = model(rank)
        tree["own"].data.flags.writeable = False
        return tree

    failure = load_failure(saved, like_of)

    assert isinstance(failure, LayoutError)
    assert failure.key == "own"

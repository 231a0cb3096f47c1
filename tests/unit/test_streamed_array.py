"""Arrays that are read only when a save writes them."""

import numpy as np
import pytest

import mpickpt
from mpickpt import PerRank, Replicated, Sharded, StreamedArray


class Given(StreamedArray):
    """Gives the boxes of an array; notes what was asked for."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype
        self.asked = []

    def read(self, box):
        self.asked.append(box)
        return self.array[box]


@pytest.fixture
def big():
    rng = np.random.default_rng(1)
    return rng.integers(0, 255, (1300, 1024, 3), dtype=np.uint8)


def saved(tmp_path, state, is_asynchronous=False):
    path = tmp_path / "run/step-0000000001"
    if is_asynchronous:
        mpickpt.save_sharded_async(state, path, step=1).result()
    else:
        mpickpt.save_sharded(state, path, step=1)
    return mpickpt.load_sharded(path)


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_every_wrapper_takes_one(tmp_path, big, is_asynchronous):
    scalar, empty = np.array(2.5), np.empty((0, 4), np.float16)

    def streamed():
        return {
            "sharded": Sharded(Given(big), global_shape=big.shape, offset=(0, 0, 0)),
            "pieces": Sharded.pieces(
                [((0,), Given(np.arange(5))), ((5,), np.arange(5, 9))],
                global_shape=(9,),
            ),
            "replicated": Replicated(Given(big[:7]), check="full"),
            "own": PerRank([Given(scalar), Given(empty)]),
        }

    state = saved(tmp_path, streamed(), is_asynchronous)

    np.testing.assert_array_equal(state["sharded"].data, big)
    pieces = {offset: array for offset, array in state["pieces"].boxes}
    np.testing.assert_array_equal(
        np.concatenate([pieces[(0,)], pieces[(5,)]]), np.arange(9)
    )
    np.testing.assert_array_equal(state["replicated"].data, big[:7])
    assert state["own"].data[0] == 2.5
    assert state["own"].data[1].shape == (0, 4)


def test_same_bytes_as_the_array_itself(tmp_path, big):
    digests = set()
    for name, array in (("a", big), ("b", Given(big))):
        state = {"x": Sharded(array, global_shape=big.shape, offset=(0, 0, 0))}
        path = tmp_path / name
        mpickpt.save_sharded(state, path, step=1)
        digests.add(mpickpt.read_manifest(path).shards[0].sha256)

    assert len(digests) == 1


def test_boxes_are_small_and_come_once_in_order(tmp_path, big):
    given = Given(big)

    saved(tmp_path, {"x": Sharded(given, global_shape=big.shape, offset=(0, 0, 0))})

    assert max(given.array[box].nbytes for box in given.asked) <= 1 << 20
    joined = np.concatenate([big[box].reshape(-1) for box in given.asked])
    np.testing.assert_array_equal(joined, big.reshape(-1))


def test_what_read_raises_fails_the_save(tmp_path, big):
    class Failing(Given):
        def read(self, box):
            raise mpickpt.CorruptShardError("the source is damaged")

    state = {"x": Sharded(Failing(big), global_shape=big.shape, offset=(0, 0, 0))}

    with pytest.raises(mpickpt.CorruptShardError, match="source is damaged"):
        mpickpt.save_sharded(state, tmp_path / "c", step=1)
    assert not list((tmp_path / "c").rglob("*.json"))


def test_read_of_another_shape_is_refused(tmp_path, big):
    class Wrong(Given):
        def read(self, box):
            return self.array[box].astype(np.int16)

    state = {"x": Sharded(Wrong(big), global_shape=big.shape, offset=(0, 0, 0))}

    with pytest.raises(mpickpt.StateTypeError, match="returned int16"):
        mpickpt.save_sharded(state, tmp_path / "c", step=1)


@pytest.mark.parametrize(
    "wrap", [PerRank, lambda a: Sharded.pieces([((0,), a)], global_shape=(3,))]
)
def test_no_place_to_load_into(tmp_path, wrap):
    array = np.arange(3)
    mpickpt.save_sharded({"x": wrap(array)}, tmp_path / "c", step=1)

    with pytest.raises(mpickpt.StateTypeError, match="a load fills arrays"):
        mpickpt.load_sharded(tmp_path / "c", like={"x": wrap(Given(array))})

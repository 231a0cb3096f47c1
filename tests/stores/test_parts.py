"""How files are divided, and what is tried again."""

import errno
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpickpt.errors import StorageError
from mpickpt.storage.stores.failures import Cancellation, Failure, Retries
from mpickpt.storage.stores.names import owner_of_part, parts_prefix
from mpickpt.storage.stores.parts import plan_parts


@given(st.integers(0, 1 << 44), st.integers(1 << 20, 1 << 26), st.integers(1, 500))
def test_parts_tile_the_file(nbytes, part_nbytes, most):
    parts = plan_parts(nbytes, part_nbytes, most)

    assert 1 <= len(parts) <= most
    assert [part.number for part in parts] == list(range(1, len(parts) + 1))
    ends = [part.offset + part.nbytes for part in parts]
    assert [part.offset for part in parts] == [0, *ends[:-1]]
    assert ends[-1] == nbytes
    assert len({part.nbytes for part in parts[:-1]}) <= 1


def test_the_owner_of_a_part_is_told_by_its_name():
    prefix = parts_prefix("step/rank.h5", "ab" * 32, 5)

    assert owner_of_part(f"{prefix}00001") == "step/rank.h5"
    assert owner_of_part("step/rank.h5") is None
    assert owner_of_part(prefix.split("/")[1]) is None


class Flaky:
    """Fails some times, then answers."""

    def __init__(self, n_failures):
        self.n_failures = n_failures
        self.n_calls = 0

    def __call__(self):
        self.n_calls += 1
        if self.n_calls <= self.n_failures:
            raise ConnectionError("cut")
        return "answer"


def retries(for_s, *, is_transient=True):
    failure = Failure(
        errno=errno.EIO, reason="cut", advice="mend it", is_transient=is_transient
    )
    return Retries(explain=lambda error: failure, for_s=for_s)


def test_what_passes_is_tried_again():
    call = Flaky(2)

    assert retries(30.0).run("read", "s3://b/x", call) == "answer"
    assert call.n_calls == 3


def test_what_does_not_pass_in_time_says_what_to_do():
    with pytest.raises(StorageError, match="mend it") as info:
        retries(0.5).run("read", "s3://b/x", Flaky(1000))

    assert str(info.value).startswith("cannot read s3://b/x: cut (")
    assert (info.value.errno, info.value.path) == (errno.EIO, "s3://b/x")
    assert isinstance(info.value.__cause__, ConnectionError)


def test_what_cannot_pass_is_tried_once():
    call = Flaky(2)

    with pytest.raises(StorageError):
        retries(30.0, is_transient=False).run("read", "s3://b/x", call)

    assert call.n_calls == 1


def test_a_cancelled_pause_ends():
    asked = threading.Event()
    threading.Timer(0.3, asked.set).start()
    began = time.monotonic()

    with pytest.raises(StorageError) as failure:
        retries(60.0).run(
            "read", "s3://b/x", Flaky(1000), cancelled=Cancellation(asked)
        )

    assert failure.value.errno == errno.ECANCELED
    assert time.monotonic() - began < 30.0

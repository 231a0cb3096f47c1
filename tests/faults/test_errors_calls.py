"""The list of system calls that the errors suite fails is that of today's saves."""

import shutil

import pytest

from tests.faults.errors_calls import (
    LOOKING,
    MODES,
    Call,
    calls_of,
    lines_of,
    listed_calls,
    recorded_calls,
)

AGAIN = "record anew: python -m tests.faults.errors_calls"

RUN = "/run"
LINES = """\
7 mkdir("/run/step", 0777) = 0
7 openat(AT_FDCWD</>, "/run", O_RDONLY|O_CLOEXEC|O_DIRECTORY) = 3</run>
7 fsync(3</run>) = 0
7 close(3</run>) = 0
7 openat(AT_FDCWD</>, "/etc/passwd", O_RDONLY|O_CLOEXEC) = 3</etc/passwd>
8 access("/moment-of-the-errors-suite/write", F_OK) = -1 ENOENT (No such file)
9 pwrite64(4</run/step/f>, ""..., 4096, 0 <unfinished ...>
7 newfstatat(AT_FDCWD</>, "/run/step-2/rank00001-00001000.h5.tmp", {...}, 0) = 0
9 <... pwrite64 resumed>) = 4096
8 pwrite64(4</run/step/f>, ""..., 100, 4096) = 100
8 fcntl(4</run/step/f>, F_GETFL) = 0x8001
""".splitlines()


def in_words(calls):
    return [line.split(" ", 2)[2] for line in lines_of(calls).splitlines()]


def test_lines_of_strace_become_calls_and_ways_to_them():
    calls = calls_of(LINES, "sync", 1, RUN)

    # The rest of the file is the first write of its thread, but not the first one.
    assert in_words(calls) == [
        "mkdir 1 step writes all 1",
        "openat 1 . writes all 1",
        "fsync 1 . writes all 1",
        "close 1 . writes all 1",
        "pwrite64 1 step/f writes all 1",
        "pwrite64 2 step/f writes write 1",
        "newfstatat 0 step-2/rank00001-00001000.h5.tmp looks all 1+",
    ]


def test_list_is_read_as_it_was_written():
    calls = listed_calls()

    assert {call.mode for call in calls} == set(MODES)
    assert len(set(calls)) == len(calls)
    assert all(isinstance(call, Call) for call in calls)


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize("mode", MODES)
def test_every_change_that_a_save_makes_is_in_the_list(tmp_path, mode):
    # How Python looks at files differs from version to version; what a save changes,
    # and in which order, does not.
    listed = [c for c in listed_calls() if c.mode == mode and c.kind != LOOKING]

    recorded = [c for c in recorded_calls(mode, tmp_path) if c.kind != LOOKING]

    places = [(c.rank, c.call, c.number, c.path) for c in listed]
    assert [(c.rank, c.call, c.number, c.path) for c in recorded] == places, AGAIN

"""A site's tools answer, are absent, fail or hang; the library goes on."""

import os
import signal
import time

import pytest

from mpickpt.storage.site_command import run_site_command
from tests.unit.site_tools import install

SHORT_S = 0.3


def is_running(pid):
    """Tell whether a process is there and no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends(pid):
    end = time.monotonic() + 5
    while is_running(pid):
        if time.monotonic() > end:
            return False
    return True


@pytest.fixture
def tool(tmp_path, monkeypatch):
    def installed(script, name="tool"):
        install(tmp_path / "bin", name, script, monkeypatch)
        return name

    return installed


def test_the_answer_is_what_the_command_prints(tool):
    name = tool('printf "%s|" "$LC_ALL" "$@"; cat; echo lost >&2')

    assert run_site_command([name, "-u", "a b", ""]) == "C|-u|a b||"


def test_bytes_that_are_no_text_come_through(tool):
    name = tool(r"printf '/scratch/\377x'")

    assert os.fsencode(run_site_command([name])) == b"/scratch/\xffx"


def test_a_command_that_is_absent_tells_nothing():
    assert run_site_command(["mpickpt-has-no-such-tool"]) is None


def test_a_command_that_cannot_be_started_tells_nothing(tool, tmp_path):
    name = tool("true")
    (tmp_path / "bin" / name).write_bytes(b"\x00\x01 no program")

    assert run_site_command([name]) is None


@pytest.mark.parametrize("script", ["echo half; exit 3", "echo half; kill -9 $$"])
def test_a_command_that_fails_tells_nothing(tool, script):
    assert run_site_command([tool(script)]) is None


def test_an_exit_code_may_be_part_of_the_answer(tool):
    name = tool("echo over; exit 1")

    assert run_site_command([name], exit_codes=(0, 1)) == "over\n"


@pytest.mark.parametrize(
    "waiting", ["sleep 300", "echo half; sleep 300", "exec >&-; sleep 300"]
)
def test_a_command_that_hangs_is_killed_with_its_helpers(tool, tmp_path, waiting):
    pids = tmp_path / "pids"
    name = tool(f"echo $$ >>{pids}; sleep 300 & echo $! >>{pids}; {waiting}")
    started = time.monotonic()

    answer = run_site_command([name], SHORT_S)

    assert answer is None
    assert time.monotonic() - started < 2.0
    assert all(ends(int(pid)) for pid in pids.read_text().split())


def test_a_command_that_hung_is_not_started_again(tool, tmp_path):
    starts = tmp_path / "starts"
    name = tool(f"echo >>{starts}; sleep 300")
    run_site_command([name], SHORT_S)

    answer = run_site_command([name], SHORT_S)

    assert answer is None
    assert len(starts.read_text()) == 1


def test_a_command_that_never_stops_talking_tells_nothing(tool):
    assert run_site_command([tool("exec yes")], SHORT_S) is None


def test_it_does_not_matter_that_ended_children_are_ignored(tool):
    name = tool("echo here")
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    try:
        assert run_site_command([name]) == "here\n"
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_no_descriptor_stays_open(tool):
    name = tool("echo here")
    before = os.listdir("/proc/self/fd")

    run_site_command([name])

    assert os.listdir("/proc/self/fd") == before

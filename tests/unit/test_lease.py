"""A run directory has one writer."""

import dataclasses
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from mpickpt import LeaseHeldError, StorageError
from mpickpt.storage import lease as lease_module
from mpickpt.storage import lease_file
from mpickpt.storage.job_identity import JobIdentity
from mpickpt.storage.lease import Lease
from mpickpt.storage.lease_file import generations, newest_claim
from tests.unit.cli_runs import ROOT

# Long enough for a busy machine: a holder that lives must beat within three.
BEAT_S = 0.3


def job(name="a", restarts=0, **changes):
    current = JobIdentity.current()
    return dataclasses.replace(
        current, job=name, restart_count=restarts, **{"machine": ""} | changes
    )


def acquire(run_dir, *arguments, **options):
    return Lease.acquire(run_dir, *arguments, beat_s=BEAT_S, **options)


def go_silent(lease):
    """Let the holder die, as its machine would: without a word."""
    lease._ended.set()
    lease._thread.join()


def still_holds(lease):
    """Tell whether a process that took the lease has not lost it since."""
    try:
        lease.require()
    except LeaseHeldError:
        return False
    return True


@pytest.fixture
def no_waiting(monkeypatch):
    """Make it an error to watch anybody."""

    def watched(path):
        raise AssertionError("the holder was watched")

    monkeypatch.setattr(lease_module, "content_of", watched)


def test_free_lease_is_taken_at_once(tmp_path, no_waiting):
    with acquire(tmp_path / "run") as lease:
        lease.require()

    assert newest_claim(tmp_path / "run").record.state == "free"


def test_released_lease_is_taken_at_once(tmp_path, no_waiting):
    acquire(tmp_path, job("a")).release()

    with acquire(tmp_path, job("b")) as lease:
        lease.require()

    assert generations(tmp_path) == [2]


def test_living_holder_is_named_and_keeps_it(tmp_path):
    with acquire(tmp_path, job("a", host="node7", pid=77)) as lease:
        with pytest.raises(LeaseHeldError, match=r"job a .*77 on node7") as caught:
            acquire(tmp_path, job("b"))
        lease.require()

    error = caught.value
    assert (error.job, error.node, error.pid) == ("a", "node7", 77)
    assert error.path == str(tmp_path)


def test_second_start_of_a_job_that_still_runs_is_refused(tmp_path):
    with acquire(tmp_path, job("a", 1)):
        for restarts in (1, 0):
            with pytest.raises(LeaseHeldError):
                acquire(tmp_path, job("a", restarts))


def test_requeued_job_takes_over_at_once(tmp_path, no_waiting):
    old = acquire(tmp_path, job("a", 1))

    with acquire(tmp_path, job("a", 2)) as new:
        with pytest.raises(LeaseHeldError, match="taken over by job a"):
            old.require()
        old.release()
        new.require()


def test_silent_holder_is_replaced_after_three_beats(tmp_path):
    old = acquire(tmp_path, job("a"))
    go_silent(old)

    start = time.monotonic()
    with acquire(tmp_path, job("b")) as new:
        assert time.monotonic() - start >= 3 * BEAT_S
        with pytest.raises(LeaseHeldError, match="taken over by job b"):
            old.require()
        new.require()


def test_holder_that_wakes_up_does_not_take_it_back(tmp_path):
    old = acquire(tmp_path, job("a"))
    new = acquire(tmp_path, job("a", 1))
    old._thread.join(timeout=20)

    assert not old._thread.is_alive()
    new.require()
    new.release()


def test_clock_of_the_holder_does_not_matter(tmp_path):
    with acquire(tmp_path, job("a")):
        os.utime(newest_claim(tmp_path).path, (0, 0))
        with pytest.raises(LeaseHeldError):
            acquire(tmp_path, job("b"))


def test_holder_is_not_taken_for_dead_while_the_server_stands_still(
    tmp_path, monkeypatch
):
    held = acquire(tmp_path, job("a"))
    go_silent(held)
    looks = []

    def look_late(path):
        looks.append(path)
        if len(looks) == 1:
            time.sleep(4 * BEAT_S)
            return path.read_bytes()
        return path.read_bytes().replace(b'"beat": "0', b'"beat": "1')

    monkeypatch.setattr(lease_module, "content_of", look_late)

    with pytest.raises(LeaseHeldError, match="is written by job a"):
        acquire(tmp_path, job("b"))

    held.require()
    assert len(looks) == 2


def test_lease_beats_while_it_is_synced(tmp_path, monkeypatch):
    synced = threading.Event()
    sync_file = lease_module.sync_file

    def sync_late(descriptor, path):
        assert synced.wait(60)
        sync_file(descriptor, path)

    monkeypatch.setattr(lease_module, "sync_file", sync_late)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(acquire, tmp_path, job("a"))
        while newest_claim(tmp_path) is None or newest_claim(tmp_path).record is None:
            time.sleep(0.01)

        with pytest.raises(LeaseHeldError, match="is written by job a"):
            acquire(tmp_path, job("b"))

        synced.set()
        with first.result() as lease:
            lease.require()


def test_lease_that_cannot_be_synced_is_not_left_behind(tmp_path, monkeypatch):
    def refuse(descriptor, path):
        raise StorageError("no room", errno=errno.ENOSPC, path=str(path))

    monkeypatch.setattr(lease_module, "sync_file", refuse)

    with pytest.raises(StorageError, match="no room"):
        acquire(tmp_path)

    assert generations(tmp_path) == []


def test_listing_that_misses_the_lease_that_is_replaced_is_made_again(
    tmp_path, monkeypatch
):
    acquire(tmp_path, job("a")).release()
    listing = lease_file.control_names_in
    half_old = [[]]

    def list_bit_by_bit(directory):
        return half_old.pop() if half_old else listing(directory)

    monkeypatch.setattr(lease_file, "control_names_in", list_bit_by_bit)

    with acquire(tmp_path, job("b")) as lease:
        lease.require()

    assert lease.generation == 2


def test_patient_taker_waits_for_a_release(tmp_path):
    first = acquire(tmp_path, job("a"))
    timer = threading.Timer(2 * BEAT_S, first.release)
    timer.start()

    with acquire(tmp_path, job("b"), patience_s=60) as second:
        second.require()

    timer.join()


def test_process_of_this_host_that_died_is_replaced_at_once(tmp_path, no_waiting):
    program = (
        "import os, sys\n"
        "from mpickpt.storage.lease import Lease\n"
        "Lease.acquire(sys.argv[1])\n"
        "os.kill(os.getpid(), 9)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, tmp_path], cwd=ROOT, timeout=60, check=False
    )

    with acquire(tmp_path) as lease:
        lease.require()

    assert result.returncode == -signal.SIGKILL


def test_process_of_another_machine_is_never_taken_for_dead():
    current = JobIdentity.current()
    gone = dataclasses.replace(current, started=current.started + 1)

    assert not current.is_known_dead()
    assert gone.is_known_dead()
    assert not dataclasses.replace(gone, machine="another boot").is_known_dead()
    assert not dataclasses.replace(gone, machine="").is_known_dead()


def test_zombie_counts_as_dead():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    current = JobIdentity.current()
    with open(f"/proc/{child.pid}/stat") as stat:
        started = int(stat.read().rpartition(")")[2].split()[19])
    identity = dataclasses.replace(current, pid=child.pid, started=started)
    assert not identity.is_known_dead()

    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)

    assert identity.is_known_dead()
    child.wait()
    child.stdin.close()


def test_of_many_takers_one_wins(tmp_path):
    go_silent(acquire(tmp_path, job("dead")))

    def take(number):
        try:
            return acquire(tmp_path, job(f"taker{number}"))
        except LeaseHeldError as error:
            return error

    with ThreadPoolExecutor(6) as threads:
        results = list(threads.map(take, range(6)))

    # On a busy machine one can take over from another that did not come to beat.
    leases = [result for result in results if isinstance(result, Lease)]
    [winner] = [lease for lease in leases if still_holds(lease)]
    names = {error.job for error in results if isinstance(error, LeaseHeldError)}
    assert names <= {lease.identity.job for lease in leases}
    winner.release()


def test_taker_that_slept_does_not_win_a_number_that_was_used_up(tmp_path):
    for name in ("a", "b"):
        acquire(tmp_path, job(name)).release()
    current = acquire(tmp_path, job("c"))
    late = Lease(tmp_path, 2, job("late"), BEAT_S)

    assert not late._take()

    current.require()
    assert generations(tmp_path) == [3]
    current.release()


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"job": 1}'])
def test_lease_that_cannot_be_read_is_replaced_when_it_is_still(tmp_path, content):
    go_silent(acquire(tmp_path, job("a")))
    newest_claim(tmp_path).path.write_bytes(content)

    with acquire(tmp_path, job("b")) as lease:
        lease.require()


def test_lease_that_somebody_removed_is_lost(tmp_path):
    lease = acquire(tmp_path, job("a"))
    newest_claim(tmp_path).path.unlink()

    with pytest.raises(LeaseHeldError, match="somebody removed it"):
        lease.require()

    with acquire(tmp_path, job("b")) as other:
        other.require()
        with pytest.raises(LeaseHeldError, match="taken over by job b"):
            lease.require()


@pytest.mark.parametrize(
    ("settings", "name", "restarts"),
    [
        ({"SLURM_JOB_ID": "12"}, "slurm-12", 0),
        ({"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "3"}, "slurm-12", 3),
        (
            {
                "SLURM_JOB_ID": "15",
                "SLURM_CLUSTER_NAME": "big",
                "SLURM_ARRAY_JOB_ID": "12",
                "SLURM_ARRAY_TASK_ID": "4",
            },
            "slurm-big-12_4",
            0,
        ),
        ({"SLURM_RESTART_COUNT": "junk"}, f"process-{os.uname().nodename}-", 0),
    ],
)
def test_job_is_named_by_slurm_or_by_its_process(settings, name, restarts):
    identity = JobIdentity.current(settings)

    assert identity.job.startswith(name)
    assert identity.restart_count == restarts
    assert identity.pid == os.getpid()


def test_lease_is_taken_after_the_last_number_of_ten_digits(tmp_path):
    folder = tmp_path / "run" / ".mpickpt" / "lease"
    folder.mkdir(parents=True)
    (folder / "9999999999.json").write_text('{"state": "damaged"')

    with acquire(tmp_path / "run") as lease:
        lease.require()

    assert generations(tmp_path / "run") == [10_000_000_000]


def test_lease_behind_a_symlink_is_refused(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "run" / ".mpickpt").mkdir(parents=True)
    (tmp_path / "run" / ".mpickpt" / "lease").symlink_to(outside)

    with pytest.raises(StorageError, match="symbolic link"):
        acquire(tmp_path / "run")

    assert not list(outside.iterdir())

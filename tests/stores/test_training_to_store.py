"""Trainings under a real mpiexec whose checkpoints go on to a real S3 store."""

import json
import os
import random
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

import mpickpt
from mpickpt.storage.verification import verify_checkpoint
from tests.mpi_launch import REPOSITORY, finish, kill, start
from tests.stores.fault_proxy import Fault, fault_proxy, s3_error
from tests.stores.servers import s3_environment
from tests.stores.uploads import MIB

PROGRAM = "tests/stores/programs/train_to_store.py"
SIZE = 4
TIMEOUT_S = 90
# A call to the store is made again for 60 s, and a flush waits up to 120 s for shards.
COMMAND_TIMEOUT_S = 150
SEED = int(os.environ.get("MPICKPT_TEST_SEED", "20261130"))
# More than one part of an upload for each rank.
LARGE_NBYTES = SIZE * 18 * MIB
SMALL_NBYTES = SIZE * MIB

pytestmark = pytest.mark.timeout(300)


class Job:
    """A training on `near` and `url`; what it says of itself is in `reports`."""

    def __init__(self, near, url, report):
        self.near, self.url = near, url
        self._report = report
        self.program = None

    def start(self, *, size=SIZE, endpoint=None, nbytes=SMALL_NBYTES, **settings):
        settings |= {"near": str(self.near), "url": self.url, "nbytes": nbytes}
        settings["report"] = str(self._report)
        environ = {"MPICKPT_TIMEOUT_S": "60"}
        if endpoint is not None:
            environ |= s3_environment(endpoint)
        self._report.unlink(missing_ok=True)
        arguments = ["-m", "mpi4py", PROGRAM, json.dumps(settings)]
        self.program = start(arguments, size=size, environ=environ)

    def kill(self):
        """Kill all ranks, if they have been started and have not ended."""
        if self.program is not None and self.program.poll() is None:
            kill(self.program)

    def output(self):
        """Wait for its end, whatever that is like; return what it printed."""
        outcome = finish(self.program, TIMEOUT_S)
        assert not outcome.timed_out, outcome.output[-5000:]
        return outcome.output

    def reports(self):
        """Wait for a good end; return what each rank says."""
        output = self.output()
        assert self.program.returncode == 0, output[-5000:]
        return json.loads(self._report.read_text())

    def run(self, **settings):
        """Start it and wait; return what rank 0 says, as the others do."""
        self.start(**settings)
        first, *others = self.reports()
        for other in others:
            assert {**other, "close": 0, "flush": 0} == {
                **first,
                "close": 0,
                "flush": 0,
            }
        return first


@pytest.fixture
def job(tmp_path, s3_url):
    job = Job(tmp_path / "near", f"{s3_url}/run", tmp_path / "report.json")
    yield job
    job.kill()


@pytest.fixture
def proxy(s3_url, seaweedfs_server):
    with fault_proxy(seaweedfs_server.port) as proxy:
        yield proxy


def steps_of(run):
    return [entry.step for entry in mpickpt.checkpoints(run)]


def command(*words):
    """Run mpickpt as a user does; return its exit status and what it printed."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "mpickpt", *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            cwd=REPOSITORY,
            timeout=COMMAND_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"{error}; it had printed: {error.stdout!r}")
    return done.returncode, done.stdout


def require_whole(url, steps):
    assert steps_of(url) == steps
    status, text = command("verify", url)
    assert status == 0, text


@contextmanager
def reader_of(url):
    """Verify in the background each checkpoint that appears, as soon as it does."""
    seen, broken, is_over = set(), [], threading.Event()

    def look():
        for step in set(steps_of(url)) - seen:
            report = verify_checkpoint(mpickpt.step_path(url, step))
            if not report.is_whole:
                broken.append(report)
            seen.add(step)

    def look_again_and_again():
        while not is_over.wait(0.1):
            try:
                look()
            except Exception as error:
                broken.append(error)

    thread = threading.Thread(target=look_again_and_again)
    thread.start()
    try:
        yield seen
    finally:
        is_over.set()
        thread.join()
    look()
    assert not broken


def test_training_comes_to_the_store_and_the_commands_see_it(job):
    report = job.run(steps=8, keep_near=2, keep=2, every=2)

    assert report["close"]["outcome"] is None
    assert steps_of(job.near)[-2:] == [6, 7]
    require_whole(job.url, [4, 6])
    status, text = command("ls", job.url)
    assert status == 0
    assert "step-0000000004" in text
    assert "step-0000000006" in text
    status, text = command("show", f"{job.url}/step-0000000006")
    assert status == 0
    assert "model/w" in text
    assert job.url in text


def strike_when_bytes_have_come(job, proxy, nbytes):
    came, lock = 0, threading.Lock()

    def on_body(request, piece_nbytes):
        nonlocal came
        # Nothing more comes through while it is being killed.
        with lock:
            came += piece_nbytes
            if came >= nbytes:
                job.kill()

    proxy.on_body = on_body


def strike_before_a_manifest(job, proxy):
    def decide(request):
        if request.method == "PUT" and "manifest.json" in request.target:
            job.kill()
            return Fault(cut_body_at=0)
        return None

    proxy.decide = decide


def moments():
    """Return when to kill: after so many bytes, or None before the first manifest."""
    draw = random.Random(SEED)
    total = 2 * LARGE_NBYTES
    points = [draw.randrange(i * total // 3, (i + 1) * total // 3) for i in range(3)]
    return [*points, None]


@pytest.mark.parametrize("nbytes", moments())
def test_killed_in_mid_upload_publishes_nothing_broken_and_flush_goes_on(
    job, proxy, nbytes
):
    if nbytes is None:
        strike_before_a_manifest(job, proxy)
    else:
        strike_when_bytes_have_come(job, proxy, nbytes)

    with reader_of(job.url):
        job.start(
            steps=3, nbytes=LARGE_NBYTES, bandwidth="30MB/s", endpoint=proxy.endpoint
        )
        output = job.output()
    near, published = steps_of(job.near), steps_of(job.url)
    status, text = command("flush", job.near, "--to", job.url)

    assert job.program.returncode != 0, output
    assert near
    assert set(published) < set(near)
    assert status == 0, text
    require_whole(job.url, near)


def test_start_after_a_kill_in_mid_upload_goes_on(job, proxy):
    strike_when_bytes_have_come(job, proxy, SMALL_NBYTES // 2)
    job.start(steps=3, bandwidth="1MB/s", endpoint=proxy.endpoint)
    job.output()
    near = steps_of(job.near)
    assert not steps_of(job.url)

    report = job.run(steps=5)

    assert report["first"] == near[-1] + 1
    assert report["is_same"]
    # What the start before had saved last is copied too.
    require_whole(job.url, list(range(near[-1], 5)))


def test_empty_machine_with_fewer_ranks_restores_from_the_store(job):
    job.run(steps=3)
    shutil.rmtree(job.near)

    report = job.run(steps=4, size=2)

    assert report["source"] == f"{job.url}/step-0000000002"
    assert report["is_same"]
    assert report["first"] == 3
    assert steps_of(job.near) == [3]
    require_whole(job.url, [1, 2, 3])


def test_damaged_shard_is_restored_from_the_store(job):
    job.run(steps=3)
    *_, shard = sorted((job.near / "step-0000000002").glob("rank*.h5"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)

    report = job.run(steps=4)

    assert report["source"] == f"{job.url}/step-0000000002"
    assert report["is_same"]
    require_whole(job.url, [1, 2, 3])


def test_expired_credentials_are_told_and_lose_nothing(job, proxy):
    came, lock = set(), threading.Lock()

    def decide(request):
        """Refuse all that comes after the first manifest that is put."""
        with lock:
            if came:
                return s3_error(403, "ExpiredToken")
            if request.method == "PUT" and "manifest.json" in request.target:
                came.add(request.target)
        return None

    proxy.decide = decide

    report = job.run(steps=4, stall_s=2.0, flush_s=[1.0, None], endpoint=proxy.endpoint)
    published = steps_of(job.url)
    status, text = command("flush", job.near, "--to", job.url)

    briefly, patiently = (flush["outcome"] for flush in report["flush"])
    assert briefly is False
    assert "the credentials" in patiently
    assert "the credentials" in report["close"]["outcome"]
    assert steps_of(job.near) == [1, 2, 3]
    assert len(published) == 1
    assert status == 0, text
    require_whole(job.url, [1, 2, 3])


def test_start_with_expired_credentials_trains_on(job, proxy):
    job.run(steps=3)
    proxy.decide = lambda request: s3_error(403, "ExpiredToken")

    report = job.run(steps=5, stall_s=2.0, endpoint=proxy.endpoint)
    status, text = command("flush", job.near, "--to", job.url)

    assert report["first"] == 3
    assert report["is_same"]
    assert "the credentials" in report["close"]["outcome"]
    assert status == 0, text
    require_whole(job.url, [1, 2, 3, 4])

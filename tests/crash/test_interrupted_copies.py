"""Copiers are killed anywhere: nothing half is published, and the next goes on."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest

import mpickpt
from mpickpt.storage.copying import copy_checkpoint, copy_shards, missing_ranks
from mpickpt.storage.copying import publish_copy as publish
from mpickpt.storage.verification import verify_checkpoint
from tests.unit.cli_runs import save
from tests.unit.copies import require_copy_of

STEP = "step-0000000007"
CALLS = ("open", "mkdir", "pwrite", "fsync", "rename", "link", "unlink")
SEED = int(os.environ.get("MPICKPT_TEST_SEED", "7"))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return save(tmp_path_factory.mktemp("run") / STEP, size=4)


@pytest.fixture
def target(tmp_path):
    return tmp_path / "to" / STEP


def in_child(call):
    """Return how a forked process ended that made a call: its wait status."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            call()
            status = 0
        finally:
            os._exit(status)
    return child


def ended(child):
    return os.waitpid(child, 0)[1]


class Strike:
    """Counts system calls that change files; dies of SIGKILL at one of them."""

    def __init__(self, at=None):
        self.names = []
        self._at = at
        for name in CALLS:
            self._wrap(name, getattr(os, name))

    def _wrap(self, name, original):
        def call(*arguments, **options):
            is_change = name != "open" or arguments[1] & os.O_CREAT
            if is_change:
                self.names.append(name)
                if len(self.names) == self._at:
                    os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)

        setattr(os, name, call)


def calls_of_a_copy(source, folder):
    # In an empty directory there is one sync more.
    (folder.parent / "not empty").touch()
    read, write = os.pipe()

    def count():
        strike = Strike()
        copy_checkpoint(source, folder / "to" / STEP)
        os.write(write, ",".join(strike.names).encode())

    assert ended(in_child(count)) == 0
    names = os.read(read, 1 << 16).decode().split(",")
    os.close(read)
    os.close(write)
    return names


def require_nothing_half(source, target):
    if (target / "manifest.json").exists():
        assert verify_checkpoint(target).is_whole


def test_copier_killed_at_any_call_is_followed_by_one_that_ends(source, tmp_path):
    names = calls_of_a_copy(source, tmp_path / "counted")
    assert {"link", "rename", "pwrite", "fsync"} <= set(names)

    for number, name in enumerate(names, 1):
        target = tmp_path / f"at-{number}-{name}" / "to" / STEP

        def die(number=number, target=target):
            Strike(number)
            copy_checkpoint(source, target)

        assert ended(in_child(die)) == signal.SIGKILL, (number, name)
        require_nothing_half(source, target)
        copy_checkpoint(source, target)
        require_copy_of(source, target)


def test_copiers_killed_one_after_the_other_leave_no_rubbish(source, target, tmp_path):
    names = calls_of_a_copy(source, tmp_path / "counted")
    chosen = random.Random(SEED)

    for at in chosen.choices(range(1, len(names) + 1), k=8):

        def die(at=at):
            Strike(at)
            copy_checkpoint(source, target)

        ended(in_child(die))
        require_nothing_half(source, target)

    copy_checkpoint(source, target)
    require_copy_of(source, target)


def copy_and_publish(manifest, source, target, ranks):
    copy_shards(manifest, source, target, ranks)
    while missing_ranks(target, manifest):
        time.sleep(0.005)
    publish(target, manifest)


@pytest.mark.parametrize(
    "shares",
    [([0, 1], [2, 3]), ([0, 1, 2, 3],) * 2, ([0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2])],
    ids=["each its own", "both all", "three all, in other orders"],
)
def test_copiers_at_once_make_one_copy(source, target, shares):
    manifest = mpickpt.read_manifest(source)

    for _ in range(5):
        children = [
            in_child(lambda r=ranks: copy_and_publish(manifest, source, target, r))
            for ranks in shares
        ]
        assert [ended(child) for child in children] == [0] * len(shares)
        require_copy_of(source, target)
        shutil.rmtree(target)


def test_copier_goes_on_beside_one_that_is_killed(source, target):
    manifest = mpickpt.read_manifest(source)
    chosen = random.Random(SEED)

    for _ in range(5):
        doomed = in_child(lambda: copy_and_publish(manifest, source, target, range(4)))
        other = in_child(lambda: copy_and_publish(manifest, source, target, range(4)))
        time.sleep(chosen.uniform(0, 0.03))
        os.kill(doomed, signal.SIGKILL)
        ended(doomed)
        assert ended(other) == 0
        assert verify_checkpoint(target).is_whole
        shutil.rmtree(target)


def flush(run_dir, target, *options):
    command = [sys.executable, "-m", "mpickpt", "flush", run_dir, "--to", target]
    return subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def test_flush_killed_at_random_times_ends_when_it_is_started_again(source, target):
    chosen = random.Random(SEED)
    total = mpickpt.read_manifest(source).nbytes

    for _ in range(3):
        limit = str(total)  # about a second
        process = flush(source.parent, target.parent, "--bandwidth", limit)
        time.sleep(chosen.uniform(0.3, 1.5))
        process.kill()
        process.communicate()
        require_nothing_half(source, target)

    process = flush(source.parent, target.parent)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    require_copy_of(source, target)

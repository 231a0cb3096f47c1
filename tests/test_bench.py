"""`mpickpt bench` at sizes that measure nothing: it runs, and leaves nothing behind."""

import json
import os
import subprocess
import sys
import time

import pytest

from mpickpt.bench.command import GROUPS
from tests.mpi_launch import finish, start

TIMEOUT_S = 240
DEADLINE_S = 30
SMALL = ["--nbytes", "1MiB", "--repeat", "1"]
# Six ranks; these two are for more than the others need.
NEED_RANKS = {"reshard", "many-ranks"}


def bench(directory, *arguments, size=2):
    command = ["-m", "mpickpt", "bench", str(directory), *SMALL, *arguments]
    return start(command, size=size)


def rows_of(output):
    document = json.loads(output[output.index("{") :])
    assert document["machine"]["ranks"] >= 1
    return document["rows"]


def wait_until(condition):
    end = time.monotonic() + DEADLINE_S
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)


@pytest.mark.timeout(TIMEOUT_S + 30)
def test_bench_measures_every_row_and_leaves_nothing(tmp_path):
    outcome = finish(bench(tmp_path, "--json"), TIMEOUT_S)

    assert outcome.returncode == 0, outcome.output
    rows = rows_of(outcome.output)
    assert {row["group"] for row in rows} == {*GROUPS}
    unmeasured = {row["group"] for row in rows if row["value"] is None}
    assert unmeasured == NEED_RANKS
    assert all(row["value"] is not None or row["how"] for row in rows)
    assert not list(tmp_path.iterdir())


def test_bench_reshards_on_the_ranks_that_there_are(tmp_path):
    program = bench(tmp_path, "--json", "--only", "reshard", size=4)

    outcome = finish(program, TIMEOUT_S)

    assert outcome.returncode == 0, outcome.output
    measured = [row for row in rows_of(outcome.output) if row["value"] is not None]
    assert {row["subject"].split(",")[0] for row in measured} == {
        "reshard 4->1",
        "reshard 1->4",
    }
    read = [row["value"] for row in measured if "bytes read" in row["subject"]]
    # So small a checkpoint has a large index; each byte is read once all the same.
    assert all(1 <= value < 1.3 for value in read), read


def test_bench_prints_a_table_with_its_file_system(tmp_path):
    outcome = finish(bench(tmp_path, "--only", "startup", size=1), TIMEOUT_S)

    assert outcome.returncode == 0, outcome.output
    lines = outcome.output.splitlines()
    assert any(str(tmp_path) in line and "1 ranks" in line for line in lines)
    assert any(line.startswith("import mpickpt") for line in lines)
    assert {"reached", "missed"} & {*outcome.output.split()}


def test_bench_leaves_nothing_when_it_is_killed(tmp_path):
    program = bench(tmp_path, "--repeat", "1000", "--only", "save")
    wait_until(lambda: list(tmp_path.iterdir()))

    program.terminate()
    outcome = finish(program, DEADLINE_S)
    wait_until(lambda: not list(tmp_path.iterdir()))

    assert outcome.returncode != 0
    assert not list(tmp_path.iterdir())


def test_bench_refuses_a_disk_without_room(small_disk):
    outcome = finish(bench(small_disk, "--only", "save"), TIMEOUT_S)

    assert outcome.returncode == 2
    assert f"{small_disk} has 4.0 MiB free" in outcome.output
    assert not list(small_disk.iterdir())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--nbytes", "12 apples"], "expected a size as in 512MiB"),
        (["--repeat", "0"], "expected a whole number, 1 or more"),
        (["--only", "save,speed"], "'speed' is none of memory, save"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bench_refuses_unknown_arguments(tmp_path, arguments, complaint):
    program = subprocess.run(
        [sys.executable, "-m", "mpickpt", "bench", str(tmp_path), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"COLUMNS": "200"},
    )

    assert program.returncode == 2
    assert complaint in program.stderr

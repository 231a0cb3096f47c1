"""The model of a power loss finds what a missing sync would do, one by one."""

import pytest

from tests.faults.power_loss_models import judge_moments, moments_of, record
from tests.faults.power_loss_processes import in_child
from tests.faults.power_loss_recording import tree_of, write_tree
from tests.faults.power_loss_states import (
    BLOCK_NBYTES,
    LEVELS,
    ROOT,
    Naming,
    Recording,
    Syncing,
    Tree,
    Writing,
    crash_states,
)

TIMEOUT_S = 250

# What is left out, of which scenario, and in which column that shows.
LEFT_OUT = {
    "the sync of a shard": ("sync", "step2:shard1.tmp/fsync", "silent"),
    "all syncs of the directory before the manifest": ("sync", None, "silent"),
    "the sync of the manifest": ("sync", "step2:manifest.tmp/fsync", "silent"),
    "the sync of the directory after the manifest": ("sync", "step2/fsync-4", "lost"),
    "the syncs of the parent": ("sync", "rank0/run/fsync", "lost"),
    "the syncs of the parent of a first save": ("first", "rank0/run/fsync", "lost"),
    "the syncs of the parent of the run": ("first", "rank0/./fsync", "lost"),
    "overwriting, the sync after the manifest": (
        "overwrite",
        "rank0/step1/fsync-4",
        "silent",
    ),
    "the sync of the unlink in a prune": ("prune", "step1/fsync", "silent"),
    "the sync of the unlink in a removal": ("rm", "step1/fsync", "silent"),
    "the sync of a rejection": ("rewind", "rank0/run/fsync-2", "silent"),
    "the sync of the directory of a pin": ("control", ":pins/fsync-1", "silent"),
    "the sync of metrics": ("control", ":metrics:step1.tmp/fsync", "silent"),
    "the sync of the unlink of a halt": ("control", ".mpickpt/fsync", "silent"),
}

RECORDINGS = {}


def recording_of(scenario):
    if scenario not in RECORDINGS:
        RECORDINGS[scenario] = in_child(record, scenario, timeout_s=TIMEOUT_S)
    return RECORDINGS[scenario]


def complaints_of(scenario, recording):
    moments = list(moments_of(recording).items())
    judged = in_child(
        judge_moments, scenario, recording, moments, 0, timeout_s=TIMEOUT_S
    )
    return {column for verdict, _ in judged.values() for column in verdict.complaints}


@pytest.mark.timeout(TIMEOUT_S + 20)
@pytest.mark.parametrize("name", LEFT_OUT)
def test_model_finds_what_is_left_out(name):
    scenario, label, column = LEFT_OUT[name]
    recording = recording_of(scenario)
    if label is None:
        labels = [f"rank{rank}/step2/fsync" for rank in range(3)]
        last = "rank0/step2/fsync-4"
        kept = tuple(
            op
            for op in recording.operations
            if op.label == last or not op.label.startswith(tuple(labels))
        )
        broken = Recording(start=recording.start, operations=kept)
    else:
        broken = recording.without(label)

    found = complaints_of(scenario, broken)

    assert column in found | ({"silent"} if column == "lost" else set()), found


@pytest.mark.timeout(TIMEOUT_S + 20)
@pytest.mark.parametrize("scenario", ["sync", "prune"])
def test_model_complains_of_nothing_when_nothing_is_left_out(scenario):
    assert complaints_of(scenario, recording_of(scenario)) == set()


CONTENT = b"x" * (3 * BLOCK_NBYTES)
CREATED = Naming(label="create", changes=((ROOT, "a", 1),))
WRITTEN = Writing(label="write", node=1, offset=0, content=CONTENT)
RENAMED = Naming(label="rename", changes=((ROOT, "a", None), (ROOT, "b", 1)))
FILE_SYNCED = Syncing(label="fsync", node=1)
NAMES_SYNCED = Syncing(label="fsync", node=ROOT)


def states_after(*operations):
    recording = Recording(start=Tree(), operations=operations)
    return list(crash_states(recording, len(operations)))


def test_synced_file_and_name_are_there():
    states = states_after(CREATED, WRITTEN, FILE_SYNCED, RENAMED, NAMES_SYNCED)

    assert states == [{"b": CONTENT}]


def test_name_that_is_not_synced_may_be_any():
    states = states_after(CREATED, WRITTEN, FILE_SYNCED, RENAMED)

    assert {frozenset(state) for state in states} == {
        frozenset(),
        frozenset({"a"}),
        frozenset({"b"}),
    }


def test_bytes_that_are_not_synced_may_be_gone_or_torn():
    states = states_after(CREATED, WRITTEN, NAMES_SYNCED)

    contents = [state["a"] for state in states]
    assert len(set(contents)) == len(LEVELS)
    assert {len(content) for content in contents} == {
        0,
        len(CONTENT) // 2,
        len(CONTENT),
    }
    zeros = bytes(BLOCK_NBYTES)
    assert zeros + CONTENT[:BLOCK_NBYTES] + zeros in contents


def test_sync_before_the_write_makes_nothing_durable():
    states = states_after(CREATED, NAMES_SYNCED, FILE_SYNCED, WRITTEN)

    assert {"a": b""} in states


def test_tree_is_written_as_it_was_read(tmp_path):
    state = {"a": b"1", "d": None, "d/b": b"", "d/e": None}

    write_tree(state, tmp_path / "disk")

    assert tree_of(tmp_path / "disk").state() == state

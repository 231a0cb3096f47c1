"""What readers see of a checkpoint that is replaced or removed while they look."""

import json

import numpy as np

from mpickpt import CheckpointManager, Replicated, save_sharded, step_path
from mpickpt.cli.main import main
from mpickpt.parallel import restore
from mpickpt.storage.removal import remove_checkpoint, remove_files, unpublish
from mpickpt.storage.run_directory import RunDirectory


def save(run, step, value=1.0, **options):
    tree = {"w": Replicated(np.full(3, value))}
    save_sharded(tree, step_path(run, step), step=step, **options)


def listed_while(run, monkeypatch, capsys, change):
    """Return what `ls` says if the run changes once it has read the manifests."""
    look, changes = RunDirectory.candidates, [change]

    def look_and_change(directory):
        entries = look(directory)
        while changes:
            changes.pop()()
        return entries

    monkeypatch.setattr(RunDirectory, "candidates", look_and_change)
    main(["ls", "--json", str(run)])
    return {e["step"]: e["state"] for e in json.loads(capsys.readouterr().out)}


def test_ls_leaves_out_what_is_removed_meanwhile(tmp_path, monkeypatch, capsys):
    save(tmp_path, 1)
    save(tmp_path, 2)

    states = listed_while(
        tmp_path, monkeypatch, capsys, lambda: remove_checkpoint(step_path(tmp_path, 1))
    )

    assert states == {2: "whole"}


def test_ls_calls_nothing_damaged_of_which_files_are_being_removed(
    tmp_path, monkeypatch, capsys
):
    save(tmp_path, 1)
    save(tmp_path, 2)

    def remove_half():
        remove_files(unpublish(step_path(tmp_path, 1))[:1])

    states = listed_while(tmp_path, monkeypatch, capsys, remove_half)

    assert states == {1: "saving", 2: "whole"}


def test_ls_lists_what_has_replaced_a_checkpoint_meanwhile(
    tmp_path, monkeypatch, capsys
):
    save(tmp_path, 1)

    states = listed_while(
        tmp_path, monkeypatch, capsys, lambda: save(tmp_path, 1, 2.0, overwrite=True)
    )

    assert states == {1: "whole"}


def test_ls_still_tells_of_damage(tmp_path, monkeypatch, capsys):
    save(tmp_path, 1)

    def damage():
        (shard,) = step_path(tmp_path, 1).glob("rank*.h5")
        shard.unlink()

    states = listed_while(tmp_path, monkeypatch, capsys, damage)

    assert states == {1: "damaged"}


def test_restored_tells_of_the_checkpoint_that_was_loaded(tmp_path, monkeypatch):
    """A save replaces it after the restore has looked at its manifest."""
    save(tmp_path, 1)
    value = np.zeros(3)
    steps = restore.Load.steps

    def replaced(load):
        save(tmp_path, 1, 2.0, overwrite=True, metadata={"second": True})
        return (yield from steps(load))

    monkeypatch.setattr(restore.Load, "steps", replaced)
    with CheckpointManager(tmp_path, state=lambda: {"w": Replicated(value)}) as manager:
        restored = manager.restore_latest()

    assert (value == 2.0).all()
    assert restored.manifest.metadata == {"second": True}

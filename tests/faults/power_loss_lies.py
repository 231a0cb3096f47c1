"""Disks that lose what they said is durable: what a load and the next start do then."""

import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpickpt import step_path
from mpickpt.format.naming import MANIFEST_NAME
from mpickpt.storage.catalog import checkpoints, latest, read_manifest
from tests.crash.small_state import save
from tests.faults.matrix import Verdict
from tests.faults.power_loss_checks import go_on, load_value
from tests.faults.power_loss_cuts import FLAGS
from tests.faults.power_loss_disk import Disk, enter_own_namespace
from tests.faults.power_loss_processes import in_child
from tests.faults.power_loss_recording import Call, Hooks, act_as_rank
from tests.faults.power_loss_scenarios import SCENARIOS
from tests.faults.power_loss_states import BLOCK_NBYTES
from tests.ranks_as_threads import run_ranks

# By what a file is left with.
LOSSES = ("nothing", "zeros", "zeros-first", "zeros-last", "half", "missing")
FILES = ("shard0", "shard1", "shard2", "manifest")

# By which syncs do nothing.
LIES: dict[str, Callable[[str], bool]] = {
    "one-shard": lambda label: "shard1.tmp/fsync" in label,
    "all-shards": lambda label: "shard" in label and "/fsync" in label,
    "layout": lambda label: "layout.tmp/fsync" in label,
    "manifest": lambda label: "manifest.tmp/fsync" in label,
    "all-files": lambda label: ".tmp/fsync" in label,
    "directories": lambda label: "/fsync" in label and ".tmp/" not in label,
    "everything": lambda label: "/fsync" in label,
}


def lose_of_file(file: str, loss: str, size: int) -> Verdict:
    """Take from one file of a published checkpoint, and look."""
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        for step in (1, 2):
            save(step_path(run, step), step=step, size=size)
        directory = step_path(run, 2)
        name = MANIFEST_NAME
        if file != "manifest":
            name = read_manifest(directory).shards[int(file[-1])].path
        _lose(directory / name, loss)
        # Without a manifest there is no checkpoint: nothing to refuse.
        return _refused_or_right(run, size, may_load=False)


def lie(image: Path, file_system: str, flag: str, name: str, size: int) -> Verdict:
    """Save on a disk on which some syncs do nothing, cut the power, and look."""
    logging.disable(logging.CRITICAL)
    enter_own_namespace()
    disk = Disk(image.with_suffix(".d"), file_system, image)
    with disk.mounted():
        in_child(_save_and_cut, disk, FLAGS[flag], LIES[name], size, timeout_s=90)
    with disk.mounted() as root:
        return _refused_or_right(root / "run", size, may_load=True)


def _save_and_cut(
    disk: Disk, flag: int, is_lie: Callable[[str], bool], size: int
) -> None:
    def around(call: Call, make: Callable[[], Any]) -> Any:
        return None if is_lie(call.label) else make()

    def act(comm: Any) -> None:
        act_as_rank(comm.rank)
        SCENARIOS["sync"].act(disk.root / "run", comm, lambda _stage: None)

    with Hooks(disk.root, around).installed():
        outcomes = run_ranks(size, act, 60)
    disk.cut_power(flag)
    assert outcomes == [None] * size, outcomes


def _refused_or_right(run: Path, size: int, *, may_load: bool) -> Verdict:
    """Compare what is published with steps 1 and 2, the second of which may be bad."""
    published = {entry.step: entry.path for entry in checkpoints(run)}
    if 1 not in published or load_value(published[1], size) != 1:
        return Verdict(lost="step 1, which nothing was done to, does not load")
    if 2 in published:
        value = load_value(published[2], size)
        if value is not None and not (may_load and value == 2):
            return Verdict(silent=f"what loads as step 2 is {value!r}")
    newest = latest(run)
    if newest is None or newest.name != step_path(run, max(published)).name:
        return Verdict(silent=f"latest says {newest}, published are {published}")
    return go_on(SCENARIOS["async"], run, size)


def _lose(path: Path, loss: str) -> None:
    nbytes = path.stat().st_size
    block = min(BLOCK_NBYTES, nbytes)
    if loss == "missing":
        path.unlink()
    elif loss in ("nothing", "half"):
        os.truncate(path, nbytes // 2 if loss == "half" else 0)
    else:
        starts = {"zeros": 0, "zeros-first": 0, "zeros-last": nbytes - block}
        with path.open("r+b") as file:
            file.seek(starts[loss])
            file.write(bytes(nbytes if loss == "zeros" else block))

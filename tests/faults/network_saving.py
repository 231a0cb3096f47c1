"""Cases of the network suite: one node saves, replaces, removes, the other one reads.

Run on MPI ranks.
"""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from mpickpt import CheckpointNotFoundError, open_checkpoint
from mpickpt.storage.catalog import checkpoints, latest, step_path
from mpickpt.storage.run_directory import RunDirectory
from tests.crash.small_state import state_of
from tests.faults.network_scene import GONE, ROWS, Scene

MODES = ("sync", "async", "manager")
N_REPLACED = 4
STEP = 3

Play = Callable[[Scene], None]


def plays() -> Iterator[tuple[str, int, Play]]:
    """Yield (name, node that writes, play) of every case."""
    for mode in MODES:
        yield f"directly/{mode}", 0, _with(load_directly, mode)
        yield f"named_before/{mode}", 0, _with(name_before, mode)
    for mode, writer in itertools.product(MODES, (0, 1)):
        yield f"other_job/{mode}/node{writer}", writer, _with(load_elsewhere, mode)
    for mode, writer in itertools.product(("sync", "async"), (0, 1)):
        yield f"replaced/{mode}/node{writer}", writer, _with(replace, mode)
    for way, writer in itertools.product(("rm", "prune", "retention"), (0, 1)):
        yield f"removed/{way}/node{writer}", writer, _with(remove, way)
    for order in ("alike", "turned"):
        yield f"reshard/{order}", 0, _with(reshard, order)
    for way in ("halved", "doubled"):
        yield f"reshard/{way}", 0, _with(resize, way)


def _with(play: Callable[[Scene, str], None], how: str) -> Play:
    return lambda scene: play(scene, how)


def load_directly(scene: Scene, mode: str) -> None:
    """All ranks save; at once all load, whoever is rank 0, and each one verifies."""
    with scene.expecting("save"):
        scene.save(mode, STEP, scene.world)
    scene.require_loads(STEP, scene.world, "load")
    scene.together()
    require_loads_turned(scene, STEP)
    scene.require_whole(STEP, scene.world.size, "alone")
    require_listed(scene, STEP)


def name_before(scene: Scene, mode: str) -> None:
    """Every name was looked for on both nodes before all ranks save under it."""
    look_for(scene, STEP)
    scene.together()
    with scene.expecting("save"):
        scene.save(mode, STEP, scene.world)
    scene.together()
    require_listed(scene, STEP)
    require_loads_turned(scene, STEP)
    scene.require_whole(STEP, scene.world.size, "alone")


def load_elsewhere(scene: Scene, mode: str) -> None:
    """One node's job saves, while the other one looks all the time, and then loads."""
    look_for(scene, STEP)
    scene.together()
    scene.while_written(
        lambda: scene.save(mode, STEP, scene.job), lambda: look_for(scene, STEP)
    )
    if not scene.is_writer:
        require_listed(scene, STEP)
        scene.require_loads(STEP, scene.job, "load")
        scene.require_whole(STEP, scene.job.size, "alone")
        entries = RunDirectory(scene.run).candidates()
        problems = [entry.problem for entry in entries]
        scene.require(problems == [None], f"looks damaged: {problems}")


def replace(scene: Scene, mode: str) -> None:
    """A checkpoint is overwritten again and again: each reading is of one save."""
    path = step_path(scene.run, STEP)

    def save(number: int) -> None:
        scene.save(mode, number, scene.job, path=path, overwrite=True)

    if scene.is_writer:
        with scene.expecting("save"):
            save(0)
    scene.together()
    for number in range(1, N_REPLACED):
        known = (number - 1, number)
        scene.while_written(
            lambda number=number: save(number),
            lambda known=known: scene.read_any(path, known, scene.job.size),
        )
        if not scene.is_writer:
            with scene.expecting("read the new one"):
                scene.read_any(path, (number,), scene.job.size)
        scene.together()
        with scene.expecting("load the new one"):
            tree = scene.load(path, scene.job)
            scene.require_state(tree, number, scene.job, "load the new one")
        scene.together()


def remove(scene: Scene, way: str) -> None:
    """A checkpoint goes while it is read elsewhere; the newer one stays."""
    old, new = 1, 2
    path = step_path(scene.run, old)
    if scene.is_writer:
        with scene.expecting("save"):
            scene.save("sync", old, scene.job)
    scene.together()

    def read() -> None:
        with contextlib.suppress(*GONE):
            scene.read_any(path, (old,), scene.job.size)

    scene.while_written(lambda: remove_old(scene, way, old, new), read)
    if not scene.is_writer:
        scene.soon(lambda: is_gone(path), f"{path} can still be opened", "silent")
        scene.soon(lambda: listed(scene) == [new], f"{old} stays listed", "wrong_error")
        scene.require_loads(new, scene.job, "load the newer")
    scene.together()
    scene.soon(lambda: not os.path.exists(path), f"{path} is still there", "rubbish")


def remove_old(scene: Scene, way: str, old: int, new: int) -> None:
    """Save a newer step and remove the old one, in one of the ways."""
    if way == "retention":
        scene.at = new
        with scene.manager(scene.job, keep=1) as manager:
            manager.save(new)
        return
    scene.save("sync", new, scene.job)
    if scene.job.rank == 0:
        rm = ["rm", str(step_path(scene.run, old))]
        prune = ["prune", str(scene.run), "--keep-last", "1"]
        scene.command(*(rm if way == "rm" else prune))


def reshard(scene: Scene, order: str) -> None:
    """Four ranks save; three of them, on both nodes, load at once."""
    world = scene.world if order == "alike" else scene.turned
    with scene.expecting("save"):
        scene.save("sync", STEP, world)
    part = scene.world.Split(0 if scene.world.rank else 1, scene.world.rank)
    if scene.world.rank:
        with scene.expecting("load"):
            path = step_path(scene.run, STEP)
            tree = scene.load(path, part, reshard=True, only=["model"])
            weights = part.allgather(tree["model"]["w"].data)
            saved_by = range(world.size)
            expected = [state_of(r, STEP, ROWS)["model"]["w"].data for r in saved_by]
            same = np.array_equal(np.concatenate(weights), np.concatenate(expected))
            scene.require(same, "resharded weights differ", "silent")
    part.Free()


def resize(scene: Scene, way: str) -> None:
    """All ranks save and one of each node loads, or the other way round."""
    size = scene.world.size
    few = scene.world.Split(int(scene.world.rank >= size // 2), scene.world.rank)
    saving, loading = (scene.world, few) if way == "halved" else (few, scene.world)
    is_few = scene.world.rank < size // 2
    if saving is scene.world or is_few:
        with scene.expecting("save"):
            scene.save("sync", STEP, saving)
    scene.together()
    if loading is scene.world or is_few:
        with scene.expecting("load"):
            path = step_path(scene.run, STEP)
            tree = scene.load(path, loading, reshard=True, only=["model"])
            weights = loading.allgather(tree["model"]["w"].data)
            saved = [state_of(r, STEP, ROWS)["model"]["w"] for r in range(saving.size)]
            expected = np.concatenate([one.data for one in saved])
            same = np.array_equal(np.concatenate(weights), expected)
            scene.require(same, "resharded weights differ", "silent")
    scene.together()
    few.Free()


def look_for(scene: Scene, step: int) -> None:
    """Ask for names, one by one, as a program that waits for a checkpoint does."""
    path = step_path(scene.run, step)
    for name in (scene.run, path, path / "manifest.json", scene.run / ".mpickpt"):
        os.path.exists(name)
    latest(scene.run)
    # Files whose names are known by listing alone are seen with the size of then.
    with contextlib.suppress(OSError):
        for name in os.listdir(path):
            os.path.exists(path / name)


def require_listed(scene: Scene, step: int) -> None:
    """Note it if the step is not the latest one as seen from this rank."""
    with scene.expecting("latest"):
        found = latest(scene.run)
        expected = step_path(scene.run, step)
        scene.require(found == expected, f"the latest is {found}", "lost")


def require_loads_turned(scene: Scene, step: int) -> None:
    """Load with the ranks in another order: rank 0 is on the other node."""
    with scene.expecting("load turned"):
        tree = scene.load(step_path(scene.run, step), scene.turned)
        scene.require_state(tree, step, scene.turned, "load turned")


def listed(scene: Scene) -> list[int]:
    """Return the steps that are published, seen from this rank."""
    return [entry.step for entry in checkpoints(scene.run)]


def is_gone(path: Path) -> bool:
    """Tell whether this rank knows that nothing is to be loaded there."""
    try:
        open_checkpoint(path)
    except CheckpointNotFoundError:
        return True
    return False

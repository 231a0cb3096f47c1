"""Cases of the network suite: the run directory is another one on each node.

Run on MPI ranks. Each node has a disk of its own at the same path.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mpickpt import (
    CheckpointError,
    IncompleteCheckpointError,
    StorageError,
    load_sharded,
)
from mpickpt.storage.catalog import step_path
from tests.faults.network_saving import MODES
from tests.faults.network_scene import TIMEOUT_S, Scene

STEP = 3

Play = Callable[[Scene], None]


def plays() -> Iterator[tuple[str, int, Play]]:
    """Yield (name, node that writes, play) of every case."""
    for mode in MODES:
        yield f"unshared/save/{mode}", 0, _save_by(mode)
    yield "unshared/load", 0, load_from_one
    yield "unshared/restore", 0, restore_from_one


def _save_by(mode: str) -> Play:
    def save(scene: Scene) -> None:
        """All ranks are refused alike, nothing is left, and they may save elsewhere."""
        shared, scene.run = scene.run, own_of(scene)
        said = refusal(scene, lambda: scene.save(mode, STEP, scene.world), StorageError)
        require_told(scene, said, ("writes there", "has no such directory"))
        left = [name for name in names_below(scene.run) if name.startswith("rank")]
        scene.require(not left, f"left behind: {left}", "rubbish")
        scene.run = shared
        with scene.expecting("save where all nodes see it"):
            scene.save(mode, STEP, scene.world)
        scene.require_loads(STEP, scene.world, "load it")
        scene.together()
        marks = [name for name in names_below(shared) if name.startswith("mark")]
        scene.require(not marks, f"left behind: {marks}", "rubbish")

    return save


def load_from_one(scene: Scene) -> None:
    """What one node has saved for itself the ranks of both do not load."""
    save_on_one(scene)
    path = step_path(scene.run, STEP)

    def load() -> None:
        load_sharded(path, comm=scene.world, reshard=True, timeout_s=TIMEOUT_S)

    said = refusal(scene, load, IncompleteCheckpointError)
    require_told(scene, said, ("has read its manifest", "has no such directory"))


def restore_from_one(scene: Scene) -> None:
    """A restart says why it finds nothing whole, and sets nothing aside."""
    save_on_one(scene)

    def restore() -> None:
        with scene.manager(scene.world) as manager:
            manager.restore_latest(reshard=True)

    said = refusal(scene, restore, IncompleteCheckpointError)
    require_told(scene, said, ("Nothing was changed", "has no such directory"))
    if scene.is_writer:
        scene.require_loads(STEP, scene.job, "load on the node that has it")


def save_on_one(scene: Scene) -> None:
    """Let one node's job save on its own disk."""
    scene.run = own_of(scene)
    if scene.is_writer:
        with scene.expecting("save"):
            scene.save("sync", STEP, scene.job)
    scene.together()


def own_of(scene: Scene) -> Path:
    """Return the place of the case on this node's own disk."""
    return scene.run.parent.with_name("own") / scene.run.name


def refusal(scene: Scene, call: Callable[[], Any], expected: type) -> str:
    """Return what was raised; note it if that was not the same on all ranks."""
    said = ""
    try:
        call()
    except CheckpointError as error:
        scene.require(isinstance(error, expected), f"raised a {type(error).__name__}")
        said = str(error)
    else:
        scene.note("silent", "went well with a directory that nodes do not share")
    everywhere = set(scene.world.allgather(said))
    scene.require(len(everywhere) == 1, f"not alike: {everywhere}")
    return said


def require_told(scene: Scene, said: str, words: tuple[str, ...]) -> None:
    """Note it if an error does not name both nodes, both disks and what is wrong."""
    disks = [f"rank {n} on node{n} (tmpfs at " for n in (0, 1)]
    sources = [f"disk-of-node{n}" for n in (0, 1)]
    for text in (*disks, *sources, "not one directory for all nodes", *words):
        scene.require(text in said, f"{text!r} is not told: {said}")


def names_below(folder: Path) -> list[str]:
    """Return the names of all files below a folder, as this node sees it."""
    return [name for _, _, names in os.walk(folder) for name in names]

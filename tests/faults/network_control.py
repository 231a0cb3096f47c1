"""Cases of the network suite: what one node says about a run, the other one hears.

Halt, pins, metrics, restores. Run on MPI ranks.
"""

import os
import time
from collections.abc import Callable, Iterator

from mpickpt import CheckpointManager
from mpickpt.storage.catalog import checkpoints, step_path
from mpickpt.storage.halt_file import HaltFile
from mpickpt.storage.run_directory import RunDirectory
from tests.crash.small_state import files_named_by_manifest, files_of
from tests.faults.network_saving import look_for
from tests.faults.network_scene import Scene

Play = Callable[[Scene], None]


def plays() -> Iterator[tuple[str, int, Play]]:
    """Yield (name, node that writes, play) of every case."""
    for writer in (0, 1):
        for name, play in (
            ("halt", halt),
            ("pins", pin),
            ("metrics", measure),
            ("restore/after_save", restore_after_save),
            ("restore/after_rewind", restore_after_rewind),
            ("restore/after_prune", restore_after_prune),
            ("resaved", save_again),
        ):
            yield f"{name}/node{writer}", writer, play


def halt(scene: Scene) -> None:
    """A run is halted from the other node, and may go on when that is taken back."""
    halt_file = HaltFile(scene.run)
    if scene.is_writer:
        with scene.expecting("save"):
            save_steps(scene, 1)
    scene.together()
    scene.require(not halt_file.exists, "halted before anyone asked for it")
    if scene.is_writer:
        with scene.expecting("train until halted"):
            train_until_halted(scene)
    else:
        time.sleep(0.3)
        if scene.job.rank == 0:
            scene.command("halt", str(scene.run))
    scene.together()
    scene.soon(lambda: halt_file.exists, "the halt is not seen", "silent")
    scene.together()
    if scene.is_writer and scene.job.rank == 0:
        scene.command("halt", str(scene.run), "--clear")
    scene.together()
    scene.soon(lambda: not halt_file.exists, "the halt stays", "silent")


def train_until_halted(scene: Scene) -> None:
    """Do steps until the manager says stop, for a while."""
    end = time.monotonic() + 8.0
    with scene.manager(scene.job) as manager:
        step = scene.at = 1
        while not manager.should_stop:
            step += 1
            manager.save_if_due(step)
            time.sleep(0.02)
            if scene.job.bcast(time.monotonic() >= end):
                break
        scene.require(manager.should_stop, "the halt was not heard", "silent")


def pin(scene: Scene) -> None:
    """A pin of the other node holds a checkpoint, and lets it go."""
    run = RunDirectory(scene.run)
    scene.require(run.pins() == [], "pinned before anyone asked for it")
    manager = None
    if scene.is_writer:
        manager = scene.manager(scene.job, keep=1)
        save_next(scene, manager, 1)
    for words, step, left in (("pin", 2, [1, 2]), ("unpin", 3, [3])):
        scene.together()
        if not scene.is_writer and scene.job.rank == 0:
            scene.command(words, str(scene.run), "1")
        scene.together()
        if manager is not None:
            save_next(scene, manager, step)
        scene.together()
        require_steps(scene, left)
    if manager is not None:
        manager.close()


def measure(scene: Scene) -> None:
    """What the other node measured is known at the next save."""
    if scene.is_writer:
        with scene.expecting("save"), scene.manager(scene.job) as manager:
            manager.save(1, metrics={"loss": 3.0})
    run = RunDirectory(scene.run)
    for loss in (3.0, 1.0, 0.5):
        scene.together()
        if not scene.is_writer and scene.job.rank == 0:
            scene.command("set-metric", str(scene.run), "1", f"loss={loss}")
        scene.together()
        found = [entry.metrics for entry in run.candidates()]
        scene.require(found == [{"loss": loss}], f"loss is {loss}, seen: {found}")


def restore_after_save(scene: Scene) -> None:
    """A new job on the other node goes on from the newest step at once."""
    scene.while_written(lambda: save_steps(scene, 1, 2, 3), lambda: watch(scene))
    if not scene.is_writer:
        restore_and_save(scene, newest=3, following=4)
    scene.together()
    require_steps(scene, [1, 2, 3, 4])


def restore_after_rewind(scene: Scene) -> None:
    """The older job set steps aside: a new one does not take them for the newest."""

    def write() -> None:
        save_steps(scene, 1, 2, 3)
        with scene.manager(scene.job) as manager:
            manager.rewind(1)

    scene.while_written(write, lambda: watch(scene))
    if not scene.is_writer:
        restore_and_save(scene, newest=1, following=2)
    scene.together()
    require_steps(scene, [1, 2])
    rejected = [entry.step for entry in RunDirectory(scene.run).rejected()]
    scene.require(sorted(rejected) == [2, 3], f"rejected are {rejected}", "rubbish")


def restore_after_prune(scene: Scene) -> None:
    """The older job removed steps: a new one does not stumble over them."""

    def write() -> None:
        save_steps(scene, 1, 2, 3)
        if scene.job.rank == 0:
            scene.command("rm", "--force", str(step_path(scene.run, 3)))
            scene.command("prune", str(scene.run), "--keep-last", "1")

    scene.while_written(write, lambda: watch(scene))
    if not scene.is_writer:
        restore_and_save(scene, newest=2, following=3)
    scene.together()
    require_steps(scene, [2, 3])


def save_again(scene: Scene) -> None:
    """All ranks go back and save the same steps again: not into what was set aside.

    Rank 0 is on the node that writes.
    """
    comm = scene.world if scene.world.bcast(scene.is_writer) else scene.turned
    with scene.expecting("save, go back, save"):
        with scene.manager(comm) as manager:
            for step in (1, 2, 3):
                save_next(scene, manager, step)
            watch(scene)
            manager.rewind(1)
            for step in (2, 3):
                save_next(scene, manager, step)
        for step in (2, 3):
            scene.require_loads(step, comm, f"load step {step}")
    scene.together()
    require_steps(scene, [1, 2, 3])


def save_next(scene: Scene, manager: CheckpointManager, step: int) -> None:
    """Save a step with a manager that stays."""
    scene.at = step
    with scene.expecting(f"save step {step}"):
        manager.save(step, wait=True)


def save_steps(scene: Scene, *steps: int) -> None:
    """Save steps with managers of the writer's job."""
    for step in steps:
        scene.save("manager", step, scene.job)


def watch(scene: Scene) -> None:
    """Look at everything of the run, as an evaluator does."""
    for step in range(5):
        look_for(scene, step)
    for entry in RunDirectory(scene.run).candidates():
        _ = entry.problem
    _ = HaltFile(scene.run).exists


def restore_and_save(scene: Scene, *, newest: int, following: int) -> None:
    """Go on as a new job does that was just started on this node."""
    with scene.expecting("restore_latest"):
        with scene.manager(scene.job) as manager:
            restored = manager.restore_latest()
        found = None if restored is None else restored.step
        scene.require(found == newest, f"restored {found}, not {newest}", "lost")
        if restored is not None:
            scene.require_state(restored.state, found, scene.job, "restore_latest")
            scene.require(restored.rejected == {}, f"rejected {restored.rejected}")
    with scene.expecting("save after restore_latest"):
        scene.save("manager", following, scene.job)
        scene.require_loads(following, scene.job, "load what was saved after it")


def require_steps(scene: Scene, steps: list[int]) -> None:
    """Note it if not just these steps are published, seen from this rank."""

    def published() -> list[int]:
        return [entry.step for entry in checkpoints(scene.run)]

    found = published()
    scene.require(found == steps, f"published are {found}, not {steps}", "lost")
    expected = {step_path(scene.run, step).name for step in steps}
    left = {name for name in os.listdir(scene.run) if name.startswith("step-")}
    rubbish = {name for name in left - expected if "rejected" not in name}
    scene.require(not rubbish, f"left behind: {rubbish}", "rubbish")


def resume(scene: Scene, older: int, newer: int, later: int) -> None:
    """Go on, on all ranks, after one was killed while it saved the newer step."""
    found = older
    with scene.expecting("resume"):
        with scene.manager(scene.world) as manager:
            restored = manager.restore_latest()
            found = older if restored is None else restored.step
            scene.require(restored is not None, "nothing was restored", "lost")
            scene.require(found in (older, newer), f"restored {found}", "lost")
        if restored is not None:
            scene.require_state(restored.state, found, scene.world, "resume")
        scene.save("manager", later, scene.world)
        scene.require_loads(later, scene.world, "load what was saved then")
    scene.together()
    require_steps(scene, sorted({older, found, later}))
    for step in {older, found, later}:
        scene.require_whole(step, scene.world.size, f"step {step} alone")
        path = step_path(scene.run, step)
        left = files_of(path) - files_named_by_manifest(path)
        scene.require(not left, f"left behind: {left}", "rubbish")

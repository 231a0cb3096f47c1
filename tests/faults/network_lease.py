"""Cases of the network suite: two jobs, on two nodes, want to write in one run.

Run on MPI ranks.
"""

import contextlib
from collections.abc import Callable, Iterator

from mpickpt import LeaseHeldError
from mpickpt.parallel import run_keeper
from mpickpt.storage.lease import Lease
from mpickpt.storage.lease_file import generations
from tests.faults.network_control import require_steps, restore_and_save, save_next
from tests.faults.network_scene import Scene

BEAT_S = 1.0  # what a client may remember is younger
N_RACES = 2
SHORT_PATIENCE_S = 0.5

Play = Callable[[Scene], None]


def plays() -> Iterator[tuple[str, int, Play]]:
    """Yield (name, node that writes, play) of every case."""
    yield "lease/race", 0, race
    for writer in (0, 1):
        yield f"lease/held/node{writer}", writer, hold_lease
        yield f"lease/still/node{writer}", writer, lose_lease


def race(scene: Scene) -> None:
    """Both nodes take the lease at the same time, again and again: one gets it.

    One may take it over from the other where that did not come to beat. Then both have
    it, but only one may publish and delete: each reads it again before.
    """
    for _ in range(N_RACES):
        lease = None
        scene.together()
        if scene.job.rank == 0:
            with scene.expecting("the race"), contextlib.suppress(LeaseHeldError):
                lease = Lease.acquire(scene.run, beat_s=BEAT_S)
        scene.together()
        found = scene.world.allgather(None if lease is None else standing(lease))
        if scene.world.rank == 0:
            taken = [one for one in found if one is not None]
            count = sum(holds for holds, _ in taken)
            scene.require(count == 1, f"{count} hold the lease: {taken}", "silent")
        scene.together()
        if lease is not None:
            lease.release()


def standing(lease: Lease) -> tuple[bool, str]:
    """Tell whether a process that took the lease still holds it, and what it sees."""
    seen = generations(lease.run_dir)
    try:
        lease.require()
    except LeaseHeldError as error:
        return False, f"generation {lease.generation} among {seen}: {error}"
    return True, f"generation {lease.generation} among {seen}"


def hold_lease(scene: Scene) -> None:
    """A second job is refused while the first one writes, and goes on after it."""
    run_keeper.LEASE_PATIENCE_S = SHORT_PATIENCE_S
    if scene.is_writer:
        manager = scene.manager(scene.job)
        save_next(scene, manager, 1)
    scene.together()
    if not scene.is_writer:
        refused = False
        with scene.manager(scene.job) as second:
            try:
                second.save(7)
            except LeaseHeldError:
                refused = True
        scene.require(refused, "two jobs write at once", "silent")
    scene.together()
    if scene.is_writer:
        save_next(scene, manager, 2)
        manager.close()
    scene.together()
    if not scene.is_writer:
        restore_and_save(scene, newest=2, following=3)
    scene.together()
    require_steps(scene, [1, 2, 3])


def lose_lease(scene: Scene) -> None:
    """A holder that is still loses the lease to the other node, and finds that out."""
    lease = None
    if scene.is_writer and scene.job.rank == 0:
        lease = Lease.acquire(scene.run, beat_s=BEAT_S)
        lease._ended.set()  # as if the process were stopped
    scene.together()
    taken = None
    if not scene.is_writer and scene.job.rank == 0:
        with scene.expecting("taking over", "lost"):
            taken = Lease.acquire(scene.run, beat_s=BEAT_S)
    scene.together()
    if lease is not None:
        try:
            lease.require()
        except LeaseHeldError:
            pass
        else:
            scene.note("silent", "two jobs hold the lease")
    if taken is not None:
        with scene.expecting("the new holder", "wrong_error"):
            taken.require()
            taken.release()
    scene.together()

"""Cases of the network suite for what NFS does and the real ones here do not.

Names that come late, handles that a server forgot. Run on MPI ranks, over the stand-in.
"""

import errno
import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from mpickpt import CheckpointError, load_sharded, open_checkpoint
from mpickpt.storage.catalog import step_path
from mpickpt.storage.verification import verify_checkpoint
from tests.faults.network_saving import MODES, require_listed, require_loads_turned
from tests.faults.network_scene import TIMEOUT_S, Scene

SETTINGS = "user.network.settings"
HIDDEN_S = 1.0
ONCE_S = 0.5
FOR_EVER_S = 3600.0
FOR_EVER = 1 << 20
# How long a load may try before it says what is wrong.
PATIENT_S = 15.0
STEP = 3
# Of the files that rank 0 reads, and one that a rank of the other node reads.
FILES = {
    "manifest": "*/manifest.json",
    "shard": "*/rank00001-*.h5",
    "layout": "*/layout-*.h5",
}

Play = Callable[[Scene], None]


def plays() -> Iterator[tuple[str, int, Play]]:
    """Yield (name, node that writes, play) of every case."""
    for mode in MODES:
        yield f"hidden/{mode}", 0, _with(save_hidden, mode)
    for what, pattern in FILES.items():
        for call, once, always in (
            ("open", ONCE_S, FOR_EVER_S),
            ("read", 1, FOR_EVER),
        ):
            key = f"stale_{call}"
            yield f"{key}/once/{what}", 0, _with(read_on, {key: [pattern, once]})
            yield f"{key}/always/{what}", 0, _with(give_up, {key: [pattern, always]})


def _with(play: Callable[[Scene, Any], None], how: Any) -> Play:
    return lambda scene: play(scene, how)


def behave(scene: Scene, **settings: Any) -> None:
    """Tell both clients of the stand-in how to behave from now on."""
    scene.together()
    if scene.job.rank == 0:
        os.setxattr(scene.run.parent, SETTINGS, json.dumps(settings).encode())
    scene.together()


def save_hidden(scene: Scene, mode: str) -> None:
    """What one node makes is not to be seen on the other one for a while."""
    behave(scene, hidden_s=HIDDEN_S)
    with scene.expecting("save"):
        scene.save(mode, STEP, scene.world)
    scene.require_loads(STEP, scene.world, "load")
    scene.together()
    time.sleep(HIDDEN_S)
    behave(scene)
    require_loads_turned(scene, STEP)
    require_listed(scene, STEP)
    scene.require_whole(STEP, scene.world.size, "alone")
    scene.together()


def read_on(scene: Scene, settings: dict[str, Any]) -> None:
    """A handle gets stale once: whoever reads goes on by itself."""
    with scene.expecting("save"):
        scene.save("sync", STEP, scene.world)
    behave(scene, **settings)
    scene.require_loads(STEP, scene.world, "load")
    behave(scene, **settings)
    require_loads_turned(scene, STEP)
    behave(scene, **settings)
    scene.require_whole(STEP, scene.world.size, "alone")
    behave(scene, **settings)
    with scene.expecting("restore"), scene.manager(scene.world) as manager:
        restored = manager.restore_latest()
        found = None if restored is None else restored.step
        scene.require(found == STEP, f"restored {found}", "lost")
    behave(scene)


def give_up(scene: Scene, settings: dict[str, Any]) -> None:
    """A handle stays stale: all ranks soon say so alike, and nothing is set aside."""
    path = step_path(scene.run, STEP)
    with scene.expecting("save"):
        scene.save("sync", STEP, scene.world)
    behave(scene, **settings)
    begin = time.monotonic()
    said = failure_of(lambda: load_sharded(path, comm=scene.world, timeout_s=TIMEOUT_S))
    seconds = time.monotonic() - begin
    scene.require(seconds < PATIENT_S, f"took {seconds:.1f} s", "hung")
    scene.require(said is not None, "loaded what could not be read", "silent")
    everywhere = scene.world.allgather(said)
    scene.require(len({str(one) for one in everywhere}) == 1, f"{everywhere}")
    if said is not None:
        scene.require(said["errno"] == errno.ESTALE, f"not a stale handle: {said}")
        scene.require(str(said["path"]).startswith(str(path)), f"no path: {said}")
        known = said["rank"] is not None and str(said["host"]).startswith("node")
        scene.require(known, f"no rank or host: {said}")
    behave(scene, **settings)
    said = failure_of(lambda: read_alone(path))
    scene.require(said is not None, "read alone what could not be read", "silent")
    behave(scene)
    scene.require_loads(STEP, scene.world, "load when all is well again")
    scene.together()


def read_alone(path: Any) -> None:
    """Read everything without the other ranks; raise what is wrong."""
    for file in verify_checkpoint(path).failures:
        raise file.error
    with open_checkpoint(path) as checkpoint:
        checkpoint.load()


def failure_of(call: Callable[[], Any]) -> dict[str, Any] | None:
    """Return what an error of ours says, None where nothing was raised."""
    try:
        call()
    except CheckpointError as error:
        names = ("rank", "host", "errno", "path")
        said = {name: getattr(error, name, None) for name in names}
        return said | {"class": type(error).__name__, "text": str(error)}
    return None

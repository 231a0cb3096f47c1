"""Nodes with a disk each, all on this machine, and checkpoints spread over them.

Ranks are on one node where they call one directory their node's own, so a directory
for each node is all that it takes.
"""

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from mpickpt import read_manifest, save_sharded, step_path
from mpickpt.format.local_tier import for_node, with_local_tier
from mpickpt.format.manifest import dump_manifest
from mpickpt.parallel.communicators import conversations_of
from mpickpt.parallel.local_restore import LocalRestorer
from mpickpt.parallel.run_keeper import RunKeeper
from tests.states import on_ranks
from tests.training import Training


class Disks:
    """The disks of some nodes.

    Parameters
    ----------
    folder : Path
        Where a directory stands for each.
    count : int
        Number of nodes.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.count = count

    def run(self, node: int) -> Path:
        """Return the run directory on the disk of a node."""
        return self.folder / f"node{node}" / "run"

    def step(self, node: int, step: int) -> Path:
        """Return the directory of a step on the disk of a node."""
        return step_path(self.run(node), step)

    def wipe(self, node: int) -> None:
        """Put an empty disk in place of one."""
        shutil.rmtree(self.run(node).parent)

    def shard(self, node: int, step: int, rank: int) -> Path:
        """Return where the shard of a saved rank is, or would be, on a disk."""
        directory = self.step(node, step)
        found = [d for d in map(lambda n: self.step(n, step), range(self.count))]
        known = next(d for d in found if (d / "manifest.json").exists())
        return directory / read_manifest(known).shards[rank].path

    def holders(self, step: int, rank: int) -> list[int]:
        """Return the nodes that have a shard."""
        nodes = range(self.count)
        return [n for n in nodes if self.shard(n, step, rank).exists()]

    def files(self) -> dict[str, bytes]:
        """Return the content of every file of a checkpoint on any disk."""
        found = self.folder.glob("node*/run/step-*/*")
        return {str(p.relative_to(self.folder)): p.read_bytes() for p in found}

    def spread(
        self,
        source: Path,
        *,
        homes: Sequence[int],
        copies: Sequence[int] | None = None,
        manifests: Iterable[int] | None = None,
        tells_tier: bool = True,
    ) -> None:
        """Put a checkpoint on the disks.

        Parameters
        ----------
        source : Path
            A checkpoint in one directory.
        homes, copies : sequence of int
            The node of each shard, and that of its copy.
        manifests : iterable of int, optional
            The nodes that get a manifest; by default all.
        tells_tier : bool
            Whether manifests say where shards lie.
        """
        manifest = read_manifest(source)
        placed = [(n, r) for r, n in enumerate(homes)]
        placed += [(n, r) for r, n in enumerate(copies or ())]
        for node, rank in placed:
            directory = self.step(node, manifest.step)
            directory.mkdir(parents=True, exist_ok=True)
            names = [manifest.shards[rank].path]
            if rank == 0 and manifest.layout is not None:
                names.append(manifest.layout.path)
            for name in names:
                shutil.copyfile(source / name, directory / name)
        told = with_local_tier(
            manifest, nodes=_by_name(homes), copies=_by_name(copies or ())
        )
        for node in range(self.count) if manifests is None else manifests:
            directory = self.step(node, manifest.step)
            directory.mkdir(parents=True, exist_ok=True)
            own = for_node(told, f"n{node}") if tells_tier else manifest
            (directory / "manifest.json").write_bytes(dump_manifest(own))


def _by_name(nodes: Sequence[int]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        found.setdefault(f"n{node}", []).append(rank)
    return found


def saved(path: Path, size: int, step: int, rows: int = 12) -> Path:
    """Save a step of the training into one directory, as a run has it."""
    target = step_path(path, step)

    def save(comm: Any) -> None:
        training = Training(comm, rows)
        training.train(step)
        save_sharded(training.state(), target, step=step, comm=comm)

    on_ranks(size, save)
    return target


def rename_checkpoint(directory: Path, **changes: Any) -> None:
    """Publish a manifest with other fields."""
    manifest = msgspec.structs.replace(read_manifest(directory), **changes)
    (directory / "manifest.json").write_bytes(dump_manifest(manifest))


def restorer_of(
    comm: Any,
    run: Path,
    training: Training,
    *,
    others: Sequence[Any] = (),
    timeout_s: float = 60.0,
    max_attempts: int = 3,
) -> LocalRestorer:
    """Return the restorer of a rank whose node has this run directory."""
    return LocalRestorer(
        conversations_of(comm, timeout_s),
        RunKeeper(run, None),
        template="/nvme/{node}/run",
        others=others,
        state=training.state,
        max_attempts=max_attempts,
    )


def restore(
    comm: Any,
    disks: Disks,
    places: Sequence[int],
    *,
    rows: int = 12,
    step: int | None = None,
    check: bool = True,
    **options: Any,
) -> Any:
    """Restore the newest step, or one, on a rank; each rank is on a node."""
    own = {k: options.pop(k) for k in list(options) if k in _OWN}
    training = Training(comm, rows)
    restorer = restorer_of(comm, disks.run(places[comm.rank]), training, **own)
    if step is None:
        restored = restorer.newest(None, **options)
    else:
        restored = restorer.one(step, **options)
    if restored is not None and check:
        training.adopt(restored)
        training.require_step(restored.step)
    return restored


_OWN = ("others", "timeout_s", "max_attempts")

"""Cool a hot block in a cold box, on any number of ranks, today 8 and tomorrow 6.

::

    mpiexec -n 8 python -m mpi4py examples/heat3d.py --steps 20 --save
    mpiexec -n 6 python -m mpi4py examples/heat3d.py --restart --steps 40 --save
    mpiexec -n 12 python -m mpi4py examples/heat3d.py --restart

The temperature is a 3-D field of which each rank of a Cartesian communicator holds a
box, with a halo of one cell around it for the neighbours' values. The checkpoint
knows the boxes by their place in the whole field, so any number of ranks can load
it; the halos are in none of them: they are exchanged before each step anyway.

Each run starts from the hot block, or with `--restart` from the newest checkpoint,
goes on to `--steps`, with `--save` saves the field, and then holds it against the
one that a single process computes from the start without any of this: the two must
be equal element for element. The exit status is 0 only if they are.
"""

import argparse
import hashlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import mpickpt
from mpickpt import Sharded

SHAPE = (50, 45, 38)  # cells; an even split is rare
RATE = 0.1  # diffusivity, in cells per step; above 1/6 the scheme is not stable


def main() -> int:
    """Start or restart, go on, save, and compare with a single process."""
    args = parse_args()
    dims = MPI.Compute_dims(MPI.COMM_WORLD.size, 3)
    comm = MPI.COMM_WORLD.Create_cart(dims, reorder=False)
    heat = Heat(comm)
    try:
        if args.restart:
            restart(heat, args.run)
        while heat.step < args.steps:
            heat.advance()
        if args.save:
            path = mpickpt.step_path(args.run, heat.step)
            mpickpt.save_sharded(
                heat.state(), path, step=heat.step, comm=comm, overwrite=True
            )
    except mpickpt.CollectiveTimeoutError:
        raise  # a rank is lost: each survivor fails for itself, and `-m mpi4py` aborts
    except mpickpt.CheckpointError as error:
        # Every rank has raised this same error: rank 0 says so, and fails for all.
        if comm.rank == 0:
            sys.exit(f"{type(error).__name__}: {error}")
        return 0
    return 0 if equals_field_of_one_process(heat) else 1


def parse_args() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description="Cool a hot block in a cold box.")
    option = parser.add_argument
    option("--run", type=Path, default=Path("runs/heat3d"), help="run directory")
    option("--steps", type=int, default=20, help="go on up to this step")
    option("--restart", action="store_true", help="start from the newest checkpoint")
    option("--save", action="store_true", help="save a checkpoint at the end")
    return parser.parse_args()


def restart(heat: "Heat", run: Path) -> None:
    """Fill this rank's box from the newest checkpoint, whoever saved it."""
    comm = heat.comm
    path = comm.bcast(mpickpt.latest(run) if comm.rank == 0 else None)
    if path is None:
        raise mpickpt.CheckpointNotFoundError(f"{run} holds no checkpoint")
    saved = mpickpt.load_sharded(path, comm=comm, like=heat.state(), reshard=True)
    heat.step = saved["step"]
    if comm.rank == 0:
        size = mpickpt.read_manifest(path).world_size
        print(f"step {heat.step} of {size} ranks, loaded on {comm.size}", flush=True)


class Heat:
    """One rank's box of the field, with its halo.

    Attributes
    ----------
    offset : tuple of int
        First cell of the box in the whole field, in cells, along each axis.
    padded : ndarray of float64, shape (n_0 + 2, n_1 + 2, n_2 + 2)
        The box and its halo; the halo is 0, the walls' temperature, where no
        neighbour is.
    box : ndarray of float64, shape (n_0, n_1, n_2)
        The view of `padded` that is this rank's own.
    """

    def __init__(self, comm: MPI.Cartcomm) -> None:
        self.comm = comm
        self.step = 0
        start, stop = boundaries(comm.dims, comm.coords)
        self.offset = tuple(start)
        self.padded = np.zeros(np.subtract(stop, start) + 2)
        self.box = self.padded[1:-1, 1:-1, 1:-1]
        self.box[...] = hot_block()[tuple(map(slice, start, stop))]

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds: the box and its place, without the halo."""
        box = Sharded(self.box, global_shape=SHAPE, offset=self.offset)
        return {"temperature": box, "step": self.step}

    def advance(self) -> None:
        """Fill the halo from the neighbours and take one step."""
        for axis in range(3):
            self._exchange(axis)
        diffuse(self.padded)
        self.step += 1

    def _exchange(self, axis: int) -> None:
        faces = np.moveaxis(self.padded, axis, 0)
        below, above = self.comm.Shift(axis, 1)
        for own, halo, to, source in ((-2, 0, above, below), (1, -1, below, above)):
            received = np.zeros_like(faces[own])  # stays 0 where there is a wall
            self.comm.Sendrecv(faces[own].copy(), to, recvbuf=received, source=source)
            faces[halo] = received


def boundaries(dims: list[int], coords: list[int]) -> tuple[list[int], list[int]]:
    """Return the first cell and the cell after the last of a box, along each axis."""
    axes = list(zip(SHAPE, dims, coords, strict=True))
    start = [cells * at // parts for cells, parts, at in axes]
    stop = [cells * (at + 1) // parts for cells, parts, at in axes]
    return start, stop


def hot_block() -> np.ndarray:
    """Return the whole field at step 0: uneven in itself, so that no two cells swap."""
    field = np.zeros(SHAPE)
    hot = field[10:35, 5:30, 8:20]
    hot[...] = 100 + np.random.default_rng(3).random(hot.shape)
    return field


def diffuse(padded: np.ndarray) -> None:
    """Move heat between neighbouring cells for one step, halo included as it is.

    Each cell's sum has one fixed order, so a split field stays equal to the bit.
    """
    centre = padded[1:-1, 1:-1, 1:-1]
    around = padded[:-2, 1:-1, 1:-1] + padded[2:, 1:-1, 1:-1]
    around += padded[1:-1, :-2, 1:-1]
    around += padded[1:-1, 2:, 1:-1]
    around += padded[1:-1, 1:-1, :-2]
    around += padded[1:-1, 1:-1, 2:]
    centre += RATE * (around - 6 * centre)


def equals_field_of_one_process(heat: Heat) -> bool:
    """Hold the field against that of one process, and say so; alike on every rank."""
    comm = heat.comm
    boxes = comm.gather((heat.offset, heat.box))
    if comm.rank > 0:
        return comm.bcast(None)
    field = np.full(SHAPE, np.nan)
    for start, box in boxes:
        stop = np.add(start, box.shape)
        field[tuple(map(slice, start, stop))] = box
    alone = np.pad(hot_block(), 1)
    for _ in range(heat.step):
        diffuse(alone)
    equal = np.array_equal(field, alone[1:-1, 1:-1, 1:-1])
    split = " x ".join(map(str, comm.dims))
    verdict = "equal to" if equal else "NOT EQUAL to"
    print(f"step {heat.step} on {comm.size} ranks ({split}):", end=" ")
    print(f"all {field.size} elements {verdict} those of one process")
    print(f"digest {hashlib.sha256(field).hexdigest()}", flush=True)
    return comm.bcast(equal)


if __name__ == "__main__":
    sys.exit(main())

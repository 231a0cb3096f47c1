"""Ranks of mpiexec import a checkpoint: import_checkpoint.py KIND SOURCE TARGET."""

import sys

from mpi4py import MPI

from mpickpt import CheckpointError, importers

kind, source, target = sys.argv[1:]
try:
    getattr(importers, kind)(source, target, comm=MPI.COMM_WORLD)
except CheckpointError as error:
    # In one write, so that the lines of ranks do not mix.
    sys.stdout.write(f"{type(error).__name__}: {error}\n")
    sys.stdout.flush()
    sys.exit(1)

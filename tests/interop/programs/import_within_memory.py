"""Ranks of mpiexec import a checkpoint of DeepSpeed and print the memory it took.

import_within_memory.py SOURCE TARGET: prints, in MiB, by how much the resident memory
of the rank that needed most was above what it was before.
"""

import sys
from pathlib import Path

from mpi4py import MPI

import mpickpt
from mpickpt import importers
from mpickpt.interop.deepspeed import importer as deepspeed_import  # noqa: F401  not the import's memory


def status(field):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise LookupError(field)


comm = MPI.COMM_WORLD
source, target = sys.argv[1:]
mpickpt.save_sharded({"nothing": 1}, f"{target}-before", step=0, comm=comm)
Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
before = status("VmRSS")
importers.deepspeed(source, target, comm=comm)
most = comm.allreduce(status("VmHWM") - before, MPI.MAX)
if comm.rank == 0:
    print(f"{most:.0f}")

"""The ranks of mpiexec as torch's process group: gloo over the loopback."""

import os
import socket

from mpi4py import MPI

comm = MPI.COMM_WORLD


def start_torch():
    """Make the process group; rank 0 finds a free port for it."""
    port = 0
    if comm.rank == 0:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
    os.environ.update(
        RANK=str(comm.rank),
        WORLD_SIZE=str(comm.size),
        LOCAL_RANK=str(comm.rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(comm.bcast(port)),
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
    )
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")


def stop_torch():
    """End the process group on all ranks."""
    import torch.distributed

    torch.distributed.barrier()
    torch.distributed.destroy_process_group()

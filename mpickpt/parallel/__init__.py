"""Many processes: the only folder that talks MPI."""

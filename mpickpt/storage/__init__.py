"""One process and its files: `os` and h5py, never MPI."""

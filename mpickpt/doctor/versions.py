"""Tells what is installed."""

import platform
from importlib.metadata import PackageNotFoundError, version

from mpickpt.parallel.mpi_facts import mpi_name_in_other_process
from mpickpt.planning.findings import VersionsFound
from mpickpt.version import __version__


def installed_versions(mpi: str | None) -> VersionsFound:
    """Return the versions of what checkpoints are made with.

    Parameters
    ----------
    mpi : str or None
        What the MPI of this process calls itself; None if there is none in it. It is
        asked in a process of its own then: an MPI may end whoever loads it outside a
        job.
    """
    mpi4py = _version("mpi4py")
    return VersionsFound(
        mpickpt=__version__,
        python=platform.python_version(),
        numpy=_version("numpy"),
        h5py=_version("h5py"),
        hdf5=_hdf5(),
        mpi4py=mpi4py,
        mpi=mpi or (mpi_name_in_other_process() if mpi4py else None),
        kernel=platform.release(),
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _hdf5() -> str | None:
    try:
        from mpickpt.storage.shard_image import hdf5_version
    except ImportError:
        return None
    return hdf5_version()

"""What a doctor finds in a place where all is well, for tests to change."""

from dataclasses import replace

from mpickpt.planning.file_systems import FileSystem
from mpickpt.planning.findings import (
    DelayFound,
    Failure,
    Findings,
    PermissionsFound,
    PlaceFound,
    QuotaFound,
    RanksFound,
    SpaceFound,
    StripesFound,
    VersionsFound,
)
from mpickpt.planning.probed import (
    GRANTED,
    CreatingFound,
    DirectIoFound,
    LocksFound,
    ProcessorFound,
    RenamingFound,
    SpeedFound,
    Timing,
    Tried,
)

TB = 10**12
QUICKLY = Timing(count=5, median_s=1e-3, worst_s=2e-3)
RENAMING = RenamingFound(
    replaces=True,
    n_opened=100,
    n_failed=0,
    n_missed=0,
    keeps_readers=True,
    timing=QUICKLY,
)
SPACE = SpaceFound(free_nbytes=9 * TB, total_nbytes=10 * TB, free_inodes=10**6)
STRIPES = StripesFound(
    layout="1 stripe of 4 MiB",
    n_osts=8,
    fullest_ost=3,
    fullest_free_nbytes=TB,
)
QUOTA = QuotaFound(
    kind="user",
    name="ada",
    source="lfs quota",
    used_nbytes=TB,
    limit_nbytes=5 * TB,
    used_files=10,
    limit_files=1000,
    is_binding=True,
)
DELAY = DelayFound(
    change="new name",
    count=6,
    median_s=0.0,
    worst_s=0.0,
    n_listed=0,
    n_missing=0,
    limit_s=5.0,
)
ONE_NODE = RanksFound(
    n_ranks=2, ranks_per_host=(("n0", 2),), thread_level="MPI_THREAD_MULTIPLE"
)
TWO_NODES = replace(
    ONE_NODE,
    n_ranks=4,
    ranks_per_host=(("n0", 2), ("n1", 2)),
    locks_between_hosts=True,
    delays=(DELAY,),
    total_write_bps=4e9,
    slowest_write_bps=1e9,
)


def file_system(kind="xfs", **changes):
    system = FileSystem(
        kind=kind,
        type=kind,
        magic=0,
        point="/scratch",
        source="/dev/sdb",
        block_nbytes=4096,
    )
    return replace(system, **changes)


def failure(probe, errno="EIO"):
    return Failure(probe=probe, errno=errno, text=f"cannot {probe}", host="n0")


def findings(place=None, tried=None, versions=None, processor=None, **changes):
    """Return what is found where all is well, but for these changes."""
    well = Findings(
        directory="/scratch/run",
        host="n0",
        checkpoint_nbytes=TB,
        place=PlaceFound(
            file_system=file_system(),
            mount_options=("rw", "relatime"),
            space=SPACE,
            permissions=PermissionsFound(umask="022", group="lab", has_set_gid=True),
        ),
        tried=Tried(
            renaming=RENAMING,
            directory_sync=QUICKLY,
            sync_1mib=QUICKLY,
            sync_16mib=replace(QUICKLY, count=1),
            creating=CreatingFound(
                n_files=100, creates_per_s=5000.0, removes_per_s=9000.0
            ),
            creates_exclusively=True,
            direct_io=DirectIoFound(is_accepted=True, alignment_nbytes=512),
            locks=LocksFound(flock=GRANTED, fcntl=GRANTED),
            clock_skew_s=0.0,
            speed=SpeedFound(nbytes=256 << 20, write_bps=1e9, read_bps=2e9),
        ),
        processor=ProcessorFound(sha256_bps=1.7e9, crc32_bps=3e10, has_zlib_ng=True),
        versions=VersionsFound(
            mpickpt="1.0",
            python="3.11.7",
            numpy="2.4.0",
            h5py="3.16.0",
            hdf5="2.0.0",
            mpi4py="4.1.2",
            mpi="MPICH Version: 5.0.2",
            kernel="6.1",
        ),
    )
    return replace(
        well,
        place=replace(well.place, **(place or {})),
        tried=replace(well.tried, **(tried or {})),
        versions=replace(well.versions, **(versions or {})),
        processor=replace(well.processor, **(processor or {})),
        **changes,
    )

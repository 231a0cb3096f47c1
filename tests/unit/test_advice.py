"""Which findings lead to which advice."""

from dataclasses import fields, replace

import pytest

from mpickpt.planning.advice import RULES, advise
from mpickpt.planning.advice_on_files import NEEDED_PROBES
from mpickpt.planning.findings import PermissionsFound, SplitFound
from mpickpt.planning.probed import DirectIoFound, LocksFound, Timing
from tests.unit.findings import (
    DELAY,
    ONE_NODE,
    QUOTA,
    RENAMING,
    SPACE,
    STRIPES,
    TB,
    TWO_NODES,
    failure,
    file_system,
    findings,
)

SLOW = Timing(count=5, median_s=0.5, worst_s=9.0)
# What is found, what it is about, whether checkpoints would fail or be lost.
TABLE = {
    "well": (findings(), {}),
    "well on one node": (findings(ranks=ONE_NODE), {}),
    "well on two nodes": (findings(ranks=TWO_NODES), {}),
    "well on Lustre": (
        findings(place={"file_system": file_system("lustre"), "stripes": STRIPES}),
        {},
    ),
    "tmpfs": (findings(place={"file_system": file_system("tmpfs")}), {"memory": True}),
    "overlay": (
        findings(place={"file_system": file_system("overlay")}),
        {"overlay": True},
    ),
    "object store": (
        findings(place={"file_system": file_system("object", type="fuse.s3fs")}),
        {"object store": True},
    ),
    "unknown": (
        findings(place={"file_system": file_system("fuse")}),
        {"unknown file system": False},
    ),
    "unknown, seen by two nodes": (
        findings(place={"file_system": file_system("fuse")}, ranks=TWO_NODES),
        {},
    ),
    "no barriers": (
        findings(place={"mount_options": ("rw", "nobarrier")}),
        {"fsync": True},
    ),
    "volatile": (
        findings(
            place={
                "file_system": file_system("overlay"),
                "mount_options": ("rw", "volatile"),
            }
        ),
        {"overlay": True, "fsync": True},
    ),
    "NFS": (findings(place={"file_system": file_system("nfs")}), {"NFS": False}),
    "soft NFS": (
        findings(
            place={
                "file_system": file_system("nfs"),
                "mount_options": ("rw", "vers=4.2", "soft"),
            }
        ),
        {"NFS": False, "soft mount": True},
    ),
    "another soft": (findings(place={"mount_options": ("rw", "soft")}), {}),
    "stripes": (
        findings(place={"stripes": replace(STRIPES, complaint="over all OSTs")}),
        {"stripes": False},
    ),
    "stripes not known": (
        findings(place={"stripes": replace(STRIPES, layout=None)}),
        {},
    ),
    "full OST": (
        findings(place={"stripes": replace(STRIPES, fullest_free_nbytes=1 << 20)}),
        {"full OST": False},
    ),
    "OST that takes no shard": (
        findings(
            place={"stripes": replace(STRIPES, fullest_free_nbytes=TB // 5)},
            ranks=TWO_NODES,
        ),
        {"full OST": False},
    ),
    "one checkpoint fits": (
        findings(place={"space": replace(SPACE, free_nbytes=2 * TB - 1)}),
        {"space": True},
    ),
    "two checkpoints fit": (
        findings(place={"space": replace(SPACE, free_nbytes=2 * TB)}),
        {},
    ),
    "little space for an unknown size": (
        findings(
            place={"space": replace(SPACE, free_nbytes=1)}, checkpoint_nbytes=None
        ),
        {},
    ),
    "no space for an unknown size": (
        findings(
            place={"space": replace(SPACE, free_nbytes=0)}, checkpoint_nbytes=None
        ),
        {"space": True},
    ),
    "space not counted": (
        findings(place={"space": replace(SPACE, free_nbytes=None)}),
        {},
    ),
    "space not known": (findings(place={"space": None}), {}),
    "quota": (findings(place={"space": replace(SPACE, quotas=(QUOTA,))}), {}),
    "small quota": (
        findings(
            place={
                "space": replace(
                    SPACE, quotas=(replace(QUOTA, limit_nbytes=2 * TB, limit_files=12),)
                )
            }
        ),
        {"space": True, "files": True},
    ),
    "small quota of root": (
        findings(
            place={
                "space": replace(
                    SPACE,
                    quotas=(replace(QUOTA, limit_nbytes=2 * TB, is_binding=False),),
                )
            }
        ),
        {},
    ),
    "few inodes": (
        findings(place={"space": replace(SPACE, free_inodes=9)}),
        {"files": True},
    ),
    "hidden from the group": (
        findings(
            place={
                "permissions": PermissionsFound(
                    umask="077",
                    group="lab",
                    has_set_gid=False,
                    complaints=("a new file cannot be read",),
                )
            }
        ),
        {"permissions": False},
    ),
    "rename not at once": (
        findings(tried={"renaming": replace(RENAMING, n_failed=2, n_missed=1)}),
        {"rename": True},
    ),
    "rename beside": (
        findings(tried={"renaming": replace(RENAMING, replaces=False)}),
        {"rename": True},
    ),
    "readers lose": (
        findings(tried={"renaming": replace(RENAMING, keeps_readers=False)}),
        {"readers": False},
    ),
    "opening fails": (
        findings(tried={"renaming": replace(RENAMING, n_failed=2)}),
        {"readers": False},
    ),
    "created twice": (
        findings(tried={"creates_exclusively": False}),
        {"exclusive create": True},
    ),
    "slow sync": (findings(tried={"sync_16mib": SLOW}), {"slow sync": False}),
    "slow small sync": (findings(tried={"sync_1mib": SLOW}), {"slow sync": False}),
    "no direct I/O": (
        findings(tried={"direct_io": DirectIoFound(is_accepted=False, errno="EINVAL")}),
        {"direct I/O": False},
    ),
    "no direct I/O where none is wanted": (
        findings(
            place={"file_system": file_system("lustre")},
            tried={"direct_io": DirectIoFound(is_accepted=False, errno="EINVAL")},
        ),
        {},
    ),
    "no locks": (
        findings(tried={"locks": LocksFound(flock="ENOSYS", fcntl="granted")}),
        {"locks": False},
    ),
    "clock": (findings(tried={"clock_skew_s": -60.0}), {"clock": False}),
    "no h5py": (findings(versions={"h5py": None, "hdf5": None}), {"h5py": True}),
    "old HDF5": (findings(versions={"hdf5": "1.8.23"}), {"HDF5": True}),
    "oldest HDF5": (findings(versions={"hdf5": "1.10.0"}), {}),
    "zlib": (findings(processor={"has_zlib_ng": False}), {"zlib-ng": False}),
    "no SHA": (findings(processor={"sha256_bps": 3e8}), {"SHA-256": False}),
    "not shared": (
        findings(ranks=replace(TWO_NODES, hosts_without=("n1",))),
        {"not shared": True},
    ),
    "mounts differ": (
        findings(ranks=replace(TWO_NODES, file_systems=(("n1", "nfs at /scratch"),))),
        {"mounts differ": False},
    ),
    "late": (
        findings(ranks=replace(TWO_NODES, delays=(replace(DELAY, worst_s=1.0),))),
        {"late changes": False},
    ),
    "listed": (
        findings(ranks=replace(TWO_NODES, delays=(replace(DELAY, n_listed=1),))),
        {"late changes": False},
    ),
    "never": (
        findings(ranks=replace(TWO_NODES, delays=(replace(DELAY, n_missing=1),))),
        {"new name not seen": True},
    ),
    "threads": (
        findings(ranks=replace(ONE_NODE, thread_level="MPI_THREAD_SERIALIZED")),
        {"threads": False},
    ),
    "clocks of nodes": (
        findings(ranks=replace(TWO_NODES, clock_skew_s=5.0)),
        {"clocks": False},
    ),
    "split launch": (
        findings(split=SplitFound(variable="PMI_SIZE", n_processes=4)),
        {"launcher": True},
    ),
    "no MPI": (findings(failures=(failure("MPI", None),)), {"MPI": True}),
    "no answer": (
        findings(failures=(replace(failure("sync", None), has_hung=True),)),
        {"sync hangs": True},
    ),
    "failed probe that no save needs": (findings(failures=(failure("locks"),)), {}),
    **{
        f"{probe} fails": (findings(failures=(failure(probe),)), {probe: True})
        for probe in NEEDED_PROBES
    },
}


@pytest.mark.parametrize(("found", "expected"), TABLE.values(), ids=TABLE.keys())
def test_advice_follows_from_findings(found, expected):
    said = advise(found)

    assert {advice.about: advice.is_grave for advice in said} == expected


@pytest.mark.parametrize("found", [found for found, _ in TABLE.values()])
def test_advice_has_a_reason_and_a_remedy(found):
    for advice in advise(found):
        texts = (advice.what, advice.why, advice.remedy)
        assert all(text and "None" not in text for text in texts)


def test_what_would_cost_checkpoints_is_said_first():
    found = findings(
        place={"file_system": file_system("nfs")}, tried={"creates_exclusively": False}
    )

    assert [advice.is_grave for advice in advise(found)] == [True, False]


def test_every_rule_has_a_row():
    by_rule = {rule: sum(bool([*rule(f)]) for f, _ in TABLE.values()) for rule in RULES}

    assert min(by_rule.values()) >= 1, by_rule


def test_what_was_not_found_out_is_passed_over():
    well = findings()
    nothing = dict.fromkeys(field.name for field in fields(well.tried))

    assert advise(findings(tried=nothing)) == ()

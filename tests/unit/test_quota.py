"""Quotas are read from what each file system's tools print, and never guessed.

No Lustre or GPFS can run here: scripts in PATH stand for `lfs`, `mmlsquota` and
`quota` and print what their sources and manuals show.
"""

import errno
import os
import struct
import subprocess
import time

import pytest

from mpickpt.storage import quota as quota_module
from mpickpt.storage import quotactl
from mpickpt.storage.filesystem import file_system_of
from mpickpt.storage.quota import Quota, quotas_of
from mpickpt.storage.quota_tables import (
    parse_fileset,
    parse_lfs_quota,
    parse_mmlsquota,
    parse_quota,
)
from tests.unit.loop_disk import mounted
from tests.unit.site_tools import GROUP, USER, be_user, install, printing, stands_for

KIB = 1024
MIB = 1 << 20

# lustre/utils/lfs.c, print_quota(): the mount point on a line of its own where it is
# longer than 15 characters.
LFS = "       /scratch   10240       0   20480       -       5       0     100       -"
LFS_LONG = (
    "/lustre/project/scratch\n"
    "                  10240   15360   20480       -       5      50     100       -"
)
LFS_OVER = (
    "       /scratch  17000*  15360   20480 6d23h59m57s     60*     50     100 6d3h"
)
LFS_LATE = (
    "       /scratch  17000*  15360   20480    none       5       0     100       -"
)
LFS_UNSURE = (
    "       /scratch [10240]   15360   20480       -       5       0     100       -\n"
    "Some errors happened when getting quota info. Some devices may be not working or "
    'deactivated. The data in "[]" is inaccurate.'
)
LFS_DEFAULT = (
    "       /scratch   10240       0       0       -       5       0       0       -\n"
    "uid 1000 is using default block quota setting\n"
    "uid 1000 is using default file quota setting"
)
LFS_HUMAN = (
    "       /scratch     12k      0k     20k       -       5       0       0       -"
)
LFS_OF_ONE_OST = (
    "                   10240       -   20480       -       -       -       -       -"
)

# `mmlsquota -Y`, IBM Storage Scale 5; colons and slashes in values are escaped.
MM_HEADER = (
    "mmlsquota:user:HEADER:version:reserved:reserved:filesystemName:quotaType:id:name:"
    "blockUsage:blockQuota:blockLimit:blockInDoubt:blockGrace:filesUsage:filesQuota:"
    "filesLimit:filesInDoubt:filesGrace:remarks:fid:filesetname:"
)


def mm_row(fileset="", kind="USR", name="ann", space="10240:0:20480:0:none"):
    return (
        f"mmlsquota:user:0:1:::fs0:{kind}:{USER}:{name}:{space}:5:0:100:0:none::0:"
        f"{fileset}:"
    )


# quota-tools' quota.c, showquotas(), with -w -p.
QUOTA = """\
Disk quotas for user ann (uid 1000): 
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
server:/my export   10240   15360   20480       0       5       0     100       0
Disk quotas for group wheel (gid 10): 
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
server:/my export   99999*      0   20480       0       5       0       0       0
Disk quotas for group staff (gid 2000): 
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
server:/my export    1024       0       0       0       5       0       0       0
"""  # noqa: W291


def limits(row):
    return row.space.used, row.space.limit, row.files.used, row.files.limit


@pytest.mark.parametrize("text", [LFS, LFS_LONG, LFS_OVER.replace("17000", "10240")])
def test_lfs_quota_tells_use_and_hard_limits(text):
    row = parse_lfs_quota(text)

    assert row.space.used == 10240 * KIB
    assert row.space.limit == 20480 * KIB
    assert row.files.limit == 100


def test_lfs_quota_tells_that_a_soft_limit_is_passed_but_not_hard_yet():
    row = parse_lfs_quota(LFS_OVER)

    assert limits(row) == (17000 * KIB, 20480 * KIB, 60, 100)
    assert (row.space.soft, row.files.soft) == (15360 * KIB, 50)


def test_lfs_quota_tells_that_the_grace_period_is_over():
    assert parse_lfs_quota(LFS_LATE).space.limit == 15360 * KIB


def test_lfs_quota_of_a_default_or_of_zero_is_no_limit():
    assert limits(parse_lfs_quota(LFS_DEFAULT)) == (10240 * KIB, None, 5, None)


def test_lfs_quota_with_units_is_read():
    assert limits(parse_lfs_quota(LFS_HUMAN)) == (12 * KIB, 20 * KIB, 5, None)


def test_what_lfs_has_not_from_all_servers_is_unknown():
    row = parse_lfs_quota(LFS_UNSURE)

    assert not row.space.is_known
    assert row.files.is_known


def test_what_lfs_does_not_tell_is_unknown():
    row = parse_lfs_quota(LFS_OF_ONE_OST)

    assert not row.space.is_known
    assert not row.files.is_known


@pytest.mark.parametrize(
    "text",
    [
        "",
        "user quotas are not enabled.",
        "    Filesystem  kbytes   quota   limit   grace   files   quota   limit  grace",
        "/scratch 1 2 3",
    ],
)
def test_lfs_quota_that_says_something_else_tells_nothing(text):
    assert parse_lfs_quota(text) is None


def test_mmlsquota_is_read_by_the_names_of_its_fields():
    header = MM_HEADER.replace("remarks:fid:filesetname", "filesetname:remarks")
    row = mm_row().replace(":none::0::", ":none:a%3Ab%2F::")

    (found,) = parse_mmlsquota(f"{header}\n{row}")

    assert (found.kind, found.name, found.fileset) == ("user", "ann", "a:b/")
    assert limits(found) == (10240 * KIB, 20480 * KIB, 5, 100)


@pytest.mark.parametrize(
    ("space", "limit"),
    [
        ("17000*:15360:20480:0:6 days", 20480),
        ("17000:15360:20480:0:expired", 15360),
        ("10240:15360:20480:9999:none", 20480),
    ],
)
def test_mmlsquota_knows_grace_and_does_not_count_what_is_in_doubt(space, limit):
    (found,) = parse_mmlsquota(f"{MM_HEADER}\n{mm_row(space=space)}")

    assert found.space.used == int(space.split(":")[0].rstrip("*")) * KIB
    assert found.space.limit == limit * KIB


@pytest.mark.parametrize("text", ["", MM_HEADER, mm_row(), "mmlsquota: failed: 22"])
def test_mmlsquota_without_header_and_row_tells_nothing(text):
    assert parse_mmlsquota(text) == []


def test_the_fileset_of_a_directory_is_read():
    text = (
        "file name:  /gpfs/a\nflags:\nstorage pool name:  data\nfileset name:   proj\n"
    )

    assert parse_fileset(text) == "proj"
    assert parse_fileset("file name: /gpfs/a\nfileset name:\nsnapshot name:\n") is None


def test_quota_is_read_for_each_user_and_group():
    rows = parse_quota(QUOTA, time.time())

    assert set(rows) == {("user", 1000), ("group", 10), ("group", 2000)}
    assert limits(rows["user", 1000]) == (10240 * KIB, 20480 * KIB, 5, 100)
    assert limits(rows["group", 2000]) == (KIB * KIB, None, 5, None)


@pytest.mark.parametrize(("end", "limit"), [(2_000_000_000, 20480), (1, 15360)])
def test_quota_tells_when_grace_ends(end, limit):
    line = "server:/x 17000* 15360 20480 {} 5 0 0 0"
    text = f"Disk quotas for user ann (uid 1000): \n{line.format(end)}\n"

    rows = parse_quota(text, now_s=1_700_000_000)

    assert rows["user", 1000].space.limit == limit * KIB


def test_quota_none_is_no_row():
    assert parse_quota("Disk quotas for user ann (uid 1000): none\n", 0.0) == {}


@pytest.fixture
def tools(tmp_path, monkeypatch):
    be_user(monkeypatch)

    def installed(name, script):
        log = tmp_path / f"{name}.log"
        install(tmp_path / "bin", name, f'echo "$@" >>{log}\n{script}', monkeypatch)
        return log

    return installed


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "run" / "step-1"
    path.mkdir(parents=True)
    return path


def test_lustre_is_asked_for_user_group_and_project(tools, run, monkeypatch):
    monkeypatch.setattr(quota_module, "project_of_new_files", lambda _: 42)
    log = tools("lfs", printing(LFS))

    answer = quotas_of(run, stands_for("lustre", run))

    assert log.read_text().splitlines() == [
        f"quota -q -u {USER} {run}",
        f"quota -q -g {GROUP} {run}",
        f"quota -q -p 42 {run}",
    ]
    assert answer.unknown == ()
    assert answer.known[0] == Quota(
        kind="user",
        name=str(USER),
        source="lfs quota",
        used_nbytes=10240 * KIB,
        limit_nbytes=20480 * KIB,
        used_files=5,
        limit_files=100,
    )
    assert [one.kind for one in answer.known] == ["user", "group", "project"]


def test_files_count_for_the_group_of_a_set_gid_directory(tools, run):
    log = tools("lfs", printing(LFS))
    os.chmod(run, 0o2775)

    quotas_of(run, stands_for("lustre", run))

    assert f"quota -q -g {run.stat().st_gid} {run}" in log.read_text()


def test_servers_of_lustre_that_do_not_answer_are_said(tools, run):
    tools("lfs", printing(LFS_UNSURE, code=5))

    answer = quotas_of(run, stands_for("lustre", run))

    assert "lfs quota is not sure of the bytes" in answer.unknown[0]
    assert answer.known[0].limit_nbytes is None
    assert answer.known[0].limit_files == 100


@pytest.mark.parametrize("script", ["exit 1", "echo nonsense", "sleep 300"])
@pytest.mark.parametrize(
    ("kind", "name"), [("lustre", "lfs"), ("gpfs", "mmlsquota"), ("nfs", "quota")]
)
def test_a_tool_that_does_not_tell_is_unknown(
    tools, run, monkeypatch, kind, name, script
):
    monkeypatch.setattr(
        "mpickpt.storage.site_command.run_site_command.__defaults__", (0.2,)
    )
    log = tools(name, script)

    answer = quotas_of(run, stands_for(kind, run))

    assert log.exists()
    assert answer.known == ()
    assert len(answer.unknown) == 2
    assert all("does not tell" in text for text in answer.unknown)


@pytest.mark.parametrize("kind", ["lustre", "gpfs", "nfs"])
def test_a_tool_that_is_absent_is_unknown(run, monkeypatch, kind):
    be_user(monkeypatch)
    monkeypatch.setenv("PATH", str(run))

    answer = quotas_of(run, stands_for(kind, run))

    assert answer.known == ()
    assert len(answer.unknown) == 2


def test_root_is_shown_quotas_that_do_not_bind_it(tools, run, monkeypatch):
    be_user(monkeypatch, user=0, group=0)
    tools("lfs", printing(LFS))

    answer = quotas_of(run, stands_for("lustre", run))

    assert [one.is_binding for one in answer.known] == [False, False]


def test_answers_are_kept_for_all_checkpoints_of_a_run(tools, run):
    log = tools("lfs", printing(LFS))
    first = quotas_of(run, stands_for("lustre", run))

    second = quotas_of(run.parent / "step-2", stands_for("lustre", run))

    assert second == first
    assert len(log.read_text().splitlines()) == 2


def test_answers_are_asked_for_again_when_they_are_old(tools, run):
    log = tools("lfs", printing(LFS))
    quotas_of(run, stands_for("lustre", run))

    quotas_of(run, stands_for("lustre", run), max_age_s=0)

    assert len(log.read_text().splitlines()) == 4


def test_gpfs_is_asked_for_the_fileset_of_the_directory(tools, run):
    tools("mmlsattr", printing("file name: x\nfileset name:         proj"))
    rows = {
        "-u": [mm_row("root", space="1:0:2:0:none"), mm_row("proj")],
        "-g": [mm_row("proj", kind="GRP", name="staff", space="1:0:0:0:none")],
        "-j": [mm_row("", kind="FILESET", name="proj", space="7:0:9:0:none")],
    }
    cases = "".join(
        f"*' {option} '*) {printing(chr(10).join([MM_HEADER, *lines]))};;\n"
        for option, lines in rows.items()
    )
    log = tools("mmlsquota", f'case "$*" in\n{cases}esac')

    answer = quotas_of(run, stands_for("gpfs", run, source="/dev/fs0"))

    assert log.read_text().splitlines() == [
        f"-v -Y -u {USER} fs0",
        f"-v -Y -g {GROUP} fs0",
        "-v -Y -j proj fs0",
    ]
    assert answer.unknown == ()
    assert [(one.kind, one.name, one.limit_nbytes) for one in answer.known] == [
        ("user", "ann", 20480 * KIB),
        ("group", "staff", None),
        ("project", "proj", 9 * KIB),
    ]


def test_gpfs_quotas_of_filesets_are_unknown_when_the_fileset_is(tools, run):
    tools("mmlsquota", printing(f"{MM_HEADER}\n{mm_row('a')}\n{mm_row('b')}"))

    answer = quotas_of(run, stands_for("gpfs", run))

    assert answer.known == ()


def test_nfs_is_asked_in_one_call_and_may_say_that_a_limit_is_passed(tools, run):
    log = tools("quota", printing(QUOTA, code=1))

    answer = quotas_of(run, stands_for("nfs", run))

    assert log.read_text().splitlines() == [f"-ugvwp -f {run}"]
    assert [(one.kind, one.limit_nbytes) for one in answer.known] == [
        ("user", 20480 * KIB)
    ]
    assert answer.unknown == ()


def test_directories_of_ceph_are_asked_up_to_where_it_is_mounted(run, monkeypatch):
    values = {
        (str(run.parent), "ceph.quota.max_bytes"): b"1000",
        (str(run.parent), "ceph.dir.rbytes"): b"400",
        (str(run.parent.parent), "ceph.quota.max_files"): b"50",
        (str(run.parent.parent), "ceph.dir.rentries"): b"7",
        (str(run.parent.parent.parent), "ceph.quota.max_bytes"): b"1",
    }

    def getxattr(path, name):
        if (str(path), name) not in values:
            raise OSError(errno.ENODATA, "No data available")
        return values[str(path), name]

    monkeypatch.setattr(os, "getxattr", getxattr)

    answer = quotas_of(run, stands_for("cephfs", run.parent.parent))

    assert [
        (one.name, one.used_nbytes, one.limit_nbytes, one.used_files, one.limit_files)
        for one in answer.known
    ] == [
        (str(run.parent), 400, 1000, None, None),
        (str(run.parent.parent), None, None, 7, 50),
    ]


def test_other_file_systems_are_said_to_be_unknown(run):
    answer = quotas_of(run, stands_for("beegfs", run))

    assert answer.unknown == ("quotas: no way is known to ask beegfs for them",)


def test_memory_has_no_quotas_to_be_unknown(run):
    assert quotas_of(run, stands_for("tmpfs", run)).unknown == ()


@pytest.mark.parametrize(
    ("kind", "make", "options"),
    [
        ("xfs", "mkfs.xfs -q", "uquota,gquota,prjquota"),
        ("ext4", "mkfs.ext4 -q -O quota -E quotatype=usrquota:grpquota", "usrquota"),
    ],
)
def test_the_kernel_tells_the_limits_of_a_local_disk(
    tmp_path, monkeypatch, kind, make, options
):
    with mounted(tmp_path, make, options) as disk:
        run = disk / "run"
        run.mkdir(mode=0o777)
        run.chmod(0o777)
        limit = f"limit -u bsoft=4m bhard=8m ihard=10 {USER}"
        set_limits(disk, limit, foreign=kind != "xfs")
        be_user(monkeypatch)
        file_system = file_system_of(run)

        (found,) = quotas_of(run, file_system).known

        assert file_system.kind == kind
        assert (found.kind, found.name, found.source) == ("user", "1000", "quotactl")
        assert (found.soft_nbytes, found.limit_nbytes) == (4 * MIB, 8 * MIB)
        assert (found.used_files, found.limit_files) == (0, 10)
        assert found.is_binding
        assert 7 * MIB < written_by_user(run / "x", 10 * MIB) <= 8 * MIB
        (after,) = quotas_of(run, file_system, max_age_s=0).known
        assert 7 * MIB < after.used_nbytes <= 8 * MIB


@pytest.mark.parametrize(
    ("end", "enforced", "user", "limit", "is_binding"),
    [
        (0, 0b10, USER, 8 * MIB, True),
        (2**33, 0b10, USER, 8 * MIB, True),
        (1, 0b10, USER, 4 * MIB, True),
        (0, 0b01, USER, 8 * MIB, False),
        (0, 0b10, 0, 8 * MIB, False),
    ],
)
def test_what_the_kernel_tells_is_understood(
    run, monkeypatch, end, enforced, user, limit, is_binding
):
    block = struct.pack("=8QI", 8192, 4096, 5 * MIB, 10, 0, 3, end, 0, 0x3F)

    def ask(directory, device, call, kind, number):
        if kind != "user":
            raise OSError(errno.ESRCH, "No such process")
        assert (directory, device) == (run, "/dev/disk")
        return block if call == 0x800007 else struct.pack("=BxH", 1, enforced)

    monkeypatch.setattr(quotactl, "_ask", ask)
    be_user(monkeypatch, user=user)

    answer = quotas_of(run, stands_for("ext4", run, source="/dev/disk"))

    (found,) = answer.known
    assert answer.unknown == ()
    assert (found.used_nbytes, found.soft_nbytes) == (5 * MIB, 4 * MIB)
    assert (found.limit_nbytes, found.limit_files) == (limit, 10)
    assert found.is_binding == is_binding


def test_a_local_disk_without_quotas_has_none_and_knows_that(tmp_path, monkeypatch):
    with mounted(tmp_path, "mkfs.xfs -q") as disk:
        be_user(monkeypatch)

        answer = quotas_of(disk, file_system_of(disk))

        assert answer.known == ()
        # A kernel that is built without quotas does not say that there are none.
        assert all("not implemented" in text for text in answer.unknown)


def test_btrfs_tells_root_of_the_limit_of_a_subvolume(tmp_path):
    with mounted(tmp_path, "mkfs.btrfs -q") as disk:
        for command in ("quota enable", "qgroup limit 16m"):
            subprocess.run(["btrfs", *command.split(), str(disk)], check=True)

        run = disk / "run"
        run.mkdir()

        (found,) = quotas_of(run, file_system_of(run)).known

        assert (found.kind, found.name) == ("project", "qgroup 0/5")
        assert found.limit_nbytes == 16 * MIB
        assert 0 < found.used_nbytes < MIB


def test_btrfs_without_quotas_has_none_and_knows_that(tmp_path):
    with mounted(tmp_path, "mkfs.btrfs -q") as disk:
        run = disk / "run"
        run.mkdir()

        answer = quotas_of(run, file_system_of(run))

        assert (answer.known, answer.unknown) == ((), ())


def test_btrfs_is_unknown_where_its_tool_is_absent(run, monkeypatch):
    be_user(monkeypatch, user=0, group=0)
    monkeypatch.setattr(quota_module, "run_site_command", lambda *_, **__: None)

    answer = quotas_of(run, stands_for("btrfs", run))

    assert answer.unknown == ("qgroups: btrfs qgroup show does not tell",)


def test_btrfs_is_unknown_to_others_than_root(run, monkeypatch):
    be_user(monkeypatch)
    monkeypatch.setenv("PATH", str(run))

    answer = quotas_of(run, stands_for("btrfs", run))

    assert answer.unknown == ("qgroups: only root may ask btrfs for them",)


def set_limits(disk, command, *, foreign=False):
    flags = ["-x", "-f"] if foreign else ["-x"]
    program = ["xfs_quota", *flags, "-c", command, str(disk)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    if done.returncode or done.stderr:
        pytest.skip(f"no quotas can be set on this disk: {done.stderr.strip()}")


def written_by_user(path, nbytes):
    """Return how much an ordinary user could write, as the kernel has it."""
    subprocess.run(
        ["dd", "if=/dev/zero", f"of={path}", "bs=64k", f"count={nbytes >> 16}"],
        user=USER,
        group=GROUP,
        extra_groups=[],
        check=False,
        stderr=subprocess.DEVNULL,
    )
    return path.stat().st_size

"""Starts a network file system on this machine, with two nodes that mount it.

Everything lives in namespaces of its own: the servers in one for mounts, network and
processes, each node in one for mounts and host name, where the file system is mounted
at the same path. Nothing of it is seen from outside, and all of it is gone when the
servers' first process is killed, even by the death of the test.
"""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mpi_launch import REPOSITORY

ADDRESS = "10.99.0.1"  # MooseFS refuses 127.0.0.1
BOOT_ID = "/proc/sys/kernel/random/boot_id"
N_NODES = 2
START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 10.0

_HOLD = "exec sleep infinity"
# The logs stay with the rest of the servers' files, for whoever runs with --keep.
_SERVERS = f"""
set -e
mount --bind "$0" /srv
mount -t proc none /proc
mount -t tmpfs none /run
mkdir -p /srv/lib /srv/log /var/lib/glusterd /var/log/glusterfs
mount --bind /srv/lib /var/lib/glusterd
mount --bind /srv/log /var/log/glusterfs
ip link set lo up
ip address add {ADDRESS}/32 dev lo
{_HOLD}
"""
_NODE = f"""
set -e
hostname "$0"
mount --bind "$1" {BOOT_ID}
mount -t tmpfs "disk-of-$0" "$2"
{_HOLD}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A network file system that runs.

    Attributes
    ----------
    shared : Path
        Where every node sees it. Beside it, in `own`, each has a disk of its own.
    nodes : tuple of int
        A process of each node, whose mounts and host name are the node's.
    """

    shared: Path
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Host:
    """Runs commands beside the servers.

    Attributes
    ----------
    pid : int
        First process of the servers' namespaces.
    folder : Path
        Their files, which they see as /srv.
    """

    pid: int
    folder: Path

    def run(self, *command: str) -> None:
        """Run a command; raise with what it said if it fails."""
        enter = ["nsenter", f"--target={self.pid}", "--mount", "--net", "--pid"]
        _run(enter, command)


def why_not(programs: Sequence[str]) -> str | None:
    """Return what this machine lacks for network file systems, or None."""
    if os.geteuid() != 0:
        return "not root, so nothing can be mounted"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "no /dev/fuse"
    needed = ("ip", "unshare", "nsenter", "setpriv", "mount", *programs)
    missing = [name for name in needed if shutil.which(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


@contextlib.contextmanager
def gluster(folder: Path) -> Iterator[Network]:
    """Run GlusterFS: a volume spread over two bricks."""

    def serve(host: Host) -> None:
        bricks = [f"{ADDRESS}:/srv/brick{number}" for number in (0, 1)]
        host.run("glusterd")
        say = ("gluster", "--mode=script", "volume")
        _until(lambda: host.run(*say, "list"))
        host.run(*say, "create", "shared", *bricks, "force")
        host.run(*say, "start", "shared")

    def mount(host: Host, node: int, shared: Path) -> None:
        # It goes to the background when the volume answers.
        server = (f"--volfile-server={ADDRESS}", "--volfile-id=shared")
        log = f"--log-file=/srv/log/node{node}.log"
        _within(host, node, "glusterfs", *server, log, str(shared))

    with _network(folder, serve, mount) as network:
        yield network


@contextlib.contextmanager
def moose(folder: Path) -> Iterator[Network]:
    """Run MooseFS: a master and two chunk servers."""

    def serve(host: Host) -> None:
        _configure_moose(host.folder)
        host.run("mfsmaster", "-c", "/srv/master.cfg", "start")
        for number in (1, 2):
            host.run("mfschunkserver", "-c", f"/srv/chunk{number}.cfg", "start")
        ready = f"mfscli -H {ADDRESS} -SCS -p | grep -c {ADDRESS} | grep -qx 2"
        _until(lambda: host.run("sh", "-c", ready))

    def mount(host: Host, node: int, shared: Path) -> None:
        _within(host, node, "mfsmount", str(shared), "-H", ADDRESS)
        # Chunk servers that are known have not told yet how much they can hold.
        has_room = f"test $(stat -f -c %a {shlex.quote(str(shared))}) -gt 0"
        _until(lambda: _within(host, node, "sh", "-c", has_room))

    with _network(folder, serve, mount) as network:
        yield network


@contextlib.contextmanager
def nfs_like(folder: Path) -> Iterator[Network]:
    """Run a stand-in that remembers names and sizes as NFS clients do."""

    def serve(host: Host) -> None:
        (host.folder / "files").mkdir()

    def mount(host: Host, node: int, shared: Path) -> None:
        program = str(REPOSITORY / "tests/faults/programs/network_nfs_like.py")
        log = (host.folder / f"nfs{node}.log").open("w")
        with log:
            subprocess.Popen(
                [
                    *(_enter(host, node)),
                    *(sys.executable, program, str(host.folder / "files"), str(shared)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        _until(lambda: _within(host, node, "mountpoint", "-q", str(shared)))

    with _network(folder, serve, mount) as network:
        yield network


@contextlib.contextmanager
def _network(
    folder: Path,
    serve: Callable[[Host], None],
    mount: Callable[[Host, int, Path], None],
) -> Iterator[Network]:
    files, shared, own = folder / "servers", folder / "shared", folder / "own"
    for made in (files, shared, own):
        made.mkdir(parents=True)
    # The first process in the namespace of processes takes all others with it.
    tied = ["setpriv", "--pdeathsig", "KILL", "unshare", "--kill-child=KILL"]
    spaces = ["--mount", "--net", "--pid", "--fork"]
    with _held(
        [*tied, *spaces, "sh", "-c", _SERVERS, str(files)], files / "log.txt"
    ) as first:
        host = Host(first, files)
        serve(host)
        with contextlib.ExitStack() as stack:
            nodes = tuple(
                stack.enter_context(_node(host, number, own))
                for number in range(N_NODES)
            )
            for pid in nodes:
                mount(host, pid, shared)
            yield Network(shared=shared, nodes=nodes)


@contextlib.contextmanager
def _node(host: Host, number: int, own: Path) -> Iterator[int]:
    boot_id = host.folder / f"boot_id{number}"
    boot_id.write_text(f"{uuid.uuid4()}\n")
    enter = ["nsenter", f"--target={host.pid}", "--net", "--pid"]
    spaces = ["unshare", "--mount", "--uts"]
    script = ["sh", "-c", _NODE, f"node{number}", str(boot_id), str(own)]
    log = host.folder / f"node{number}.txt"
    with _held([*enter, *spaces, *script], log) as pid:
        yield pid


@contextlib.contextmanager
def _held(command: Sequence[str], log: Path) -> Iterator[int]:
    """Run a script that ends with a long sleep; yield the id of that process."""
    with log.open("w") as said:
        program = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=said)
    with contextlib.ExitStack() as stack:
        stack.callback(program.wait)
        stack.callback(program.kill)
        pid = _sleeper_below(program.pid)
        # The daemons are its children by then: with it they all end.
        stack.callback(_end, program, os.pidfd_open(pid))
        yield pid


def _end(program: "subprocess.Popen[bytes]", sleeper: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(sleeper, signal.SIGKILL)
    os.close(sleeper)
    with contextlib.suppress(subprocess.TimeoutExpired):
        program.wait(END_TIMEOUT_S)


def _sleeper_below(pid: int) -> int:
    """Return the process at the end of a chain, when it has come to sleep."""
    end = time.monotonic() + START_TIMEOUT_S
    while True:
        with contextlib.suppress(OSError):
            last = _last_below(pid)
            if Path(f"/proc/{last}/comm").read_text() == "sleep\n":
                return last
        if time.monotonic() >= end:
            raise LookupError(f"process {pid} has not come to its end")
        time.sleep(0.01)


def _last_below(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return _last_below(int(children[0])) if children else pid


def _enter(host: Host, node: int) -> list[str]:
    """Return how to start a command on a node, to end with the servers."""
    return [
        *("nsenter", f"--target={host.pid}", "--net", "--pid"),
        *("nsenter", f"--target={node}", "--mount", "--uts"),
    ]


def _within(host: Host, node: int, *command: str) -> None:
    _run(_enter(host, node), command)


def _run(enter: Sequence[str], command: Sequence[str]) -> None:
    """Run a command somewhere; raise with what it said if it fails."""
    done = subprocess.run(
        [*enter, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=START_TIMEOUT_S,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout}")


def _until(succeed: Callable[[], None]) -> None:
    end = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            return succeed()
        except RuntimeError:
            if time.monotonic() >= end:
                raise
        time.sleep(0.05)


def _configure_moose(folder: Path) -> None:
    """Write the settings; the servers see the folder as /srv."""
    own = "WORKING_USER = root\nWORKING_GROUP = root\n"
    (folder / "exports.cfg").write_text(
        f"{ADDRESS} / rw,alldirs,admin,maproot=0:0\n{ADDRESS} . rw\n"
    )
    (folder / "meta").mkdir()
    (folder / "meta/metadata.mfs").write_text("MFSM NEW")
    (folder / "master.cfg").write_text(
        f"{own}DATA_PATH = /srv/meta\nEXPORTS_FILENAME = /srv/exports.cfg\n"
        + "".join(f"{name}_LISTEN_HOST = {ADDRESS}\n" for name in _MOOSE_DOORS)
    )
    for number in (1, 2):
        for name in (f"chunk{number}", f"disk{number}"):
            (folder / name).mkdir()
        (folder / f"disk{number}.cfg").write_text(f"/srv/disk{number}\n")
        (folder / f"chunk{number}.cfg").write_text(
            f"{own}DATA_PATH = /srv/chunk{number}\n"
            f"HDD_CONF_FILENAME = /srv/disk{number}.cfg\nMASTER_HOST = {ADDRESS}\n"
            f"BIND_HOST = {ADDRESS}\nCSSERV_LISTEN_HOST = {ADDRESS}\n"
            f"CSSERV_LISTEN_PORT = {9420 + 10 * number}\n"
            "HDD_LEAVE_SPACE_DEFAULT = 64MiB\n"
        )


_MOOSE_DOORS = ("MATOML", "MATOCS", "MATOCL")

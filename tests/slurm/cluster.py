"""A real Slurm of four nodes on this machine, for the tests alone.

Each node is a slurmd in namespaces of its own, so that it has a disk, a memory and
processes that nobody else has, and can be killed at one blow as a node fails. All
files lie in one new directory, and the daemons die with the process that started
them. Nothing of a Slurm or munge that this machine may have is used or changed.
"""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

NODES = 4
START_TIMEOUT_S = 60.0
COMMAND_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
LOCAL_DISK = Path("/var/tmp")

_DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "unshare", "setpriv")
_SBIN = "/usr/sbin:/sbin"

_CONFIGURATION = """\
ClusterName=mpickpt-tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={base}/munge.socket,cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=2
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/spool/%n
SlurmctldPidFile={base}/slurmctld.pid
SlurmdPidFile={base}/slurmd.%n.pid
SlurmctldLogFile={base}/log/slurmctld.log
SlurmdLogFile={base}/log/slurmd.%n.log
SwitchType=switch/none
ReturnToService=2
KillWait=5
MessageTimeout=20
SlurmdTimeout=120
InactiveLimit=0
MinJobAge=7200
JobRequeue=1
PropagateResourceLimits=NONE
SlurmdParameters=config_overrides
{nodes}
PartitionName=debug Nodes=n[0-{last}] Default=YES MaxTime=60 State=UP OverSubscribe=YES
"""


def why_not() -> str | None:
    """Return why no Slurm can be started here; None where it can."""
    if os.geteuid() != 0:
        return "not root, so no Slurm can be started"
    missing = [name for name in _DAEMONS if not _which(name)]
    if missing:
        return f"no {', '.join(missing)}: apt-get install slurm-wlm munge"
    return None


class Cluster:
    """The daemons, and the commands that talk to them.

    Attributes
    ----------
    base : Path
        Directory of all its files.
    environ : dict
        In which sbatch, squeue and the like find this Slurm and no other.
    """

    def __init__(self) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="mpickpt-slurm-", dir="/tmp"))
        self.environ = {
            **{k: v for k, v in os.environ.items() if not _is_of_a_launcher(k)},
            "SLURM_CONF": str(self.base / "slurm.conf"),
            "PATH": f"{os.environ['PATH']}:{_SBIN}",
            # One kernel, so UCX would try shared memory between two "nodes".
            "UCX_TLS": "tcp,self",
        }
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._ports = _free_ports(NODES + 1)

    def start(self) -> None:
        """Start munged, slurmctld and the nodes; return when all nodes are idle."""
        for name in ("log", "state", "spool", "disk"):
            (self.base / name).mkdir()
        self._start_munge()
        (self.base / "slurm.conf").write_text(self._configuration())
        self._start("slurmctld", "slurmctld", "-D", "-c")
        for index in range(NODES):
            self.start_node(f"n{index}")
        wait_until(
            lambda: len(self.idle_nodes()) == NODES,
            "all nodes are idle",
            START_TIMEOUT_S,
        )

    def start_node(self, node: str) -> None:
        """Start a node, with an empty disk if it never ran."""
        disk = self.base / "disk" / node
        (self.base / "spool" / node).mkdir(exist_ok=True)
        disk.mkdir(exist_ok=True)
        mounts = f"mount --bind '{disk}' {LOCAL_DISK} && mount -t tmpfs shm /dev/shm"
        script = f"{mounts} && exec slurmd -D -N {node}"
        self._start(
            node,
            *("unshare", "--mount", "--pid", "--fork", "--mount-proc"),
            *("--kill-child", "bash", "-c", script),
        )

    def kill_node(self, node: str) -> None:
        """Let a node fail: all its processes are gone at once."""
        running = self._running.pop(node)
        running.kill()
        running.wait(STOP_TIMEOUT_S)

    def notice_dead(self, node: str) -> None:
        """Let Slurm know that a node is dead, as it knows after SlurmdTimeout."""
        reason = "Reason=not responding"
        self.run("scontrol", "update", f"NodeName={node}", "State=DOWN", reason)

    def revive_node(self, node: str) -> None:
        """Boot a dead node, which is ready when this returns."""
        self.start_node(node)
        self.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)
        wait_until(lambda: node in self.idle_nodes(), f"{node} is idle", 60.0)

    def stop(self) -> None:
        """Kill all jobs and daemons that were started here, and remove all files."""
        nodes = [name for name in self._running if name not in ("munged", "slurmctld")]
        for name in [*nodes, "slurmctld", "munged"]:
            process = self._running.pop(name, None)
            if process is None:
                continue
            # Killing a node's first process kills its whole process namespace.
            process.send_signal(signal.SIGKILL if name in nodes else signal.SIGTERM)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_TIMEOUT_S)
        shutil.rmtree(self.base, ignore_errors=True)

    def run(self, *command: str, check: bool = True) -> str:
        """Run a Slurm command and return what it prints."""
        done = subprocess.run(
            command,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
        if check and done.returncode:
            raise AssertionError(f"{command}: {done.returncode}: {done.stderr}")
        return done.stdout.strip()

    def idle_nodes(self) -> list[str]:
        """Return the nodes that answer and have nothing to do."""
        query = ("sinfo", "--noheader", "--Node", "--format", "%N %t")
        lines = self.run(*query, check=False).splitlines()
        return [line.split()[0] for line in lines if line.endswith(" idle")]

    def logs(self) -> str:
        """Return the end of what the daemons say."""
        return "\n".join(
            f"== {path.name}\n" + "\n".join(path.read_text().splitlines()[-15:])
            for path in sorted((self.base / "log").glob("*.log"))
        )

    def _start_munge(self) -> None:
        key = self.base / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        options = {
            "socket": "munge.socket",
            "key-file": "munge.key",
            "pid-file": "munge.pid",
            "seed-file": "munge.seed",
            "log-file": "log/munged.log",
        }
        arguments = [f"--{name}={self.base / file}" for name, file in options.items()]
        self._start("munged", "munged", "--foreground", "--force", *arguments)
        there = (self.base / "munge.socket").exists
        wait_until(there, "munged listens", START_TIMEOUT_S)

    def _start(self, name: str, *command: str) -> None:
        output = (self.base / "log" / f"{name}.out").open("ab")
        with output:
            self._running[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _configuration(self) -> str:
        host = socket.gethostname().partition(".")[0]
        nodes = [
            f"NodeName=n{index} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} "
            "CPUs=16 Boards=1 SocketsPerBoard=1 CoresPerSocket=16 ThreadsPerCore=1 "
            "RealMemory=1000 State=UNKNOWN"
            for index, port in enumerate(self._ports[1:])
        ]
        return _CONFIGURATION.format(
            host=host,
            port=self._ports[0],
            base=self.base,
            nodes="\n".join(nodes),
            last=NODES - 1,
        )


def wait_until(
    is_so: Callable[[], bool], what: str, timeout_s: float, pause_s: float = 0.1
) -> None:
    """Look again and again until it is so; that it never becomes so is a failure."""
    end = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(pause_s)


def _which(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:{_SBIN}")


def _is_of_a_launcher(name: str) -> bool:
    return name.startswith(("SLURM_", "SBATCH_", "PMI_", "OMPI_COMM_"))


def _free_ports(count: int) -> Sequence[int]:
    with_ports = [socket.socket() for _ in range(count)]
    try:
        for listener in with_ports:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in with_ports]
    finally:
        for listener in with_ports:
            listener.close()

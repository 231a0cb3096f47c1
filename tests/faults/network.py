"""Suite "network": what a job on one node does, as a client on another node sees it.

Over GlusterFS and MooseFS, and over a stand-in that forgets as late as NFS does; each
with two nodes that mount it at the same path, half of the ranks on each.
"""

import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.faults import (
    network_control,
    network_lease,
    network_saving,
    network_servers,
    network_stale,
    network_unshared,
)
from tests.faults.matrix import COLUMNS, Case, Verdict
from tests.faults.network_servers import Network
from tests.mpi_launch import finish, kill, start

SIZE = 4
CASE_TIMEOUT_S = 90.0
START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 30.0
N_AT_ONCE = 2
# Which rank dies, before it renames what.
KILLED = ((1, "shard"), (0, "manifest"))
KILLED_AT = {"shard": "*/rank*.h5.tmp", "manifest": "*/manifest.json.tmp"}
# What names in the short part begin with: over the real ones a checkpoint's life from
# save to removal, over the stand-in what it alone shows.
SHORT = {
    "gluster": (
        *("directly/async", "named_before/manager", "reshard/halved"),
        *("removed/retention/node1", "resaved/node0", "killed/sync/rank1/shard"),
    ),
    "moose": (
        *("directly/sync", "other_job/async/node1", "reshard/doubled"),
        *("removed/prune/node0", "pins/node1", "killed/sync/rank0/manifest"),
    ),
    "nfs_like": (
        *("named_before/sync", "halt/node1", "hidden/async", "lease/race"),
        *("stale_open/once/manifest", "stale_read/once/shard"),
        *("stale_open/always/shard", "unshared/save/sync", "unshared/load"),
    ),
}
PROGRAMS = Path("tests/faults/programs")

Verdicts = Iterator[tuple[Case, Verdict]]
Found = Iterator[tuple[str, Verdict]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSystem:
    """A file system of the suite: how to run it, and what it needs."""

    name: str
    run: Callable[[Path], AbstractContextManager[Network]]
    needs: tuple[str, ...]


FILE_SYSTEMS = (
    FileSystem(
        name="gluster",
        run=network_servers.gluster,
        needs=("glusterd", "glusterfs", "gluster"),
    ),
    FileSystem(
        name="moose",
        run=network_servers.moose,
        needs=("mfsmaster", "mfschunkserver", "mfsmount", "mfscli"),
    ),
    FileSystem(name="nfs_like", run=network_servers.nfs_like, needs=("fusermount3",)),
)


class NetworkSuite:
    """The suite; each file system runs once, for all of its cases."""

    name = "network"

    def why_not(self) -> str | None:
        """Return what this machine lacks, or None."""
        needs = [name for one in FILE_SYSTEMS for name in one.needs]
        without = network_servers.why_not(needs)
        if without is None and find_spec("mfusepy") is None:
            return "not installed: mfusepy (pip)"
        return without

    def cases(self) -> Sequence[Case]:
        """Return all cases."""
        return [
            Case(name=f"{system.name}/{name}", in_ci=is_short)
            for system in FILE_SYSTEMS
            for name, is_short in _names(system.name)
        ]

    def run(self, cases: Sequence[Case], folder: Path) -> Verdicts:
        """Run cases."""
        for system in FILE_SYSTEMS:
            by_name = {
                case.name.removeprefix(f"{system.name}/"): case
                for case in cases
                if case.name.startswith(f"{system.name}/")
            }
            if not by_name:
                continue
            with system.run(folder / system.name) as network:
                killed = [name for name in by_name if name.startswith("killed/")]
                played = [name for name in by_name if name not in killed]
                for name, verdict in _played(network, played, folder / system.name):
                    yield by_name[name], verdict
                for name, verdict in _killed(network, killed, folder / system.name):
                    yield by_name[name], verdict


def _names(system: str) -> Iterator[tuple[str, bool]]:
    """Yield the names of the cases of a file system, and whether each is short."""
    modules = [network_saving, network_control, network_lease]
    if system == "nfs_like":
        modules += [network_stale, network_unshared]
    names = [name for module in modules for name, _, _ in module.plays()]
    names += [
        f"killed/{mode}/rank{rank}/{what}"
        for mode, (rank, what) in itertools.product(network_saving.MODES, KILLED)
    ]
    for name in names:
        yield name, name.startswith(SHORT.get(system, ()))


def _played(network: Network, names: Sequence[str], folder: Path) -> Found:
    """Play cases in as few programs as can be: a new one only after a hang."""
    left = list(names)
    for attempt in itertools.count():
        if not left:
            return
        results = folder / f"results{attempt}"
        results.touch()
        arguments = [str(network.shared), str(results), json.dumps(left)]
        program = _start(network, "network_job.py", arguments)
        for line in _lines(results, program):
            name, notes, _ = json.loads(line)
            left.remove(name)
            yield name, _verdict(notes)
        outcome = finish(program, timeout_s=END_TIMEOUT_S)
        if left:
            said = outcome.output[-2000:]
            yield left.pop(0), Verdict(hung=f"status {outcome.returncode}: {said}")


def _killed(network: Network, names: Sequence[str], folder: Path) -> Found:
    """Kill a rank of each run, then resume all runs on the other nodes."""

    def kill_one(name: str) -> tuple[str, Verdict]:
        _, mode, rank, what = name.split("/")
        fault = [
            "kill",
            _run_of(name),
            rank.removeprefix("rank"),
            mode,
            KILLED_AT[what],
        ]
        arguments = [str(network.shared), *fault]
        program = _start(network, "network_killed.py", arguments, shift="0")
        outcome = finish(program, CASE_TIMEOUT_S)
        if outcome.timed_out:
            return name, Verdict(hung=outcome.output[-2000:])
        if "survived" in outcome.output or not outcome.returncode:
            return name, Verdict(silent=f"nobody died: {outcome.output[-2000:]}")
        return name, Verdict()

    with ThreadPoolExecutor(N_AT_ONCE) as threads:
        died = dict(threads.map(kill_one, names))
    yield from ((name, v) for name, v in died.items() if v.complaints)
    left = [name for name, verdict in died.items() if not verdict.complaints]
    if not left:
        return
    results = folder / "resumed"
    arguments = [str(network.shared), "resume", str(results), *map(_run_of, left)]
    program = _start(network, "network_killed.py", arguments, shift="1")
    outcome = finish(program, CASE_TIMEOUT_S + len(left) * CASE_TIMEOUT_S / 10)
    found = json.loads(results.read_text()) if results.exists() else {}
    for name in left:
        if _run_of(name) in found:
            yield name, _verdict(found[_run_of(name)])
        else:
            yield name, Verdict(hung=outcome.output[-2000:])


def _start(
    network: Network, program: str, arguments: Sequence[str], shift: str | None = None
) -> Any:
    nodes = [json.dumps(network.nodes), *([shift] if shift else [])]
    return start([str(PROGRAMS / program), *nodes, *arguments], size=SIZE)


def _lines(results: Path, program: Any) -> Iterator[str]:
    """Yield lines as they are written; kill the program when none comes for long."""
    deadline = time.monotonic() + START_TIMEOUT_S + CASE_TIMEOUT_S
    with results.open() as file:
        partly = ""
        while True:
            has_ended = program.poll() is not None
            while text := file.readline():
                partly += text
                if partly.endswith("\n"):
                    yield partly
                    partly, deadline = "", time.monotonic() + CASE_TIMEOUT_S
            if has_ended:
                return
            if time.monotonic() >= deadline:
                kill(program)
                return
            time.sleep(0.05)


def _verdict(notes: Sequence[tuple[str, str]]) -> Verdict:
    texts: dict[str, list[str]] = {}
    for column, text in notes:
        assert column in COLUMNS, column
        texts.setdefault(column, []).append(text)
    return Verdict(**{column: "; ".join(t[:4]) for column, t in texts.items()})


def _run_of(name: str) -> str:
    return name.replace("/", "-")


SUITE = NetworkSuite()

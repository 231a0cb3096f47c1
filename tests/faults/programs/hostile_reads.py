"""Program: forges a run in many ways, reads it in every way, watches the process.

One line of JSON for each case: what was wrong, by column. The process may open and
change nothing outside the run; it ends itself when a reader hangs.
"""

import faulthandler
import gc
import json
import os
import resource
import shutil
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mpickpt
from mpickpt import CheckpointError
from mpickpt.cli import diff, export, halt, ls, pin, prune, rm, set_metric, show, verify
from mpickpt.storage import lease
from tests.faults.hostile_forgeries import CASES
from tests.faults.hostile_named import Forgery
from tests.faults.hostile_readers import READ_ONLY, WRITING, save_run

HANGING_S = 400.0
CPU_S = 10.0
EXTRA_NBYTES = 300 << 20
ADDRESS_SPACE_NBYTES = 2 << 30
LONGEST_MESSAGE = 30_000
EVERY_NTH_WRITES = 5

LOADED = (diff, export, halt, ls, pin, prune, rm, set_metric, show, verify)
HARMLESS = tuple(
    {
        *("/proc/", "/sys/", "/dev/null", "/dev/urandom", "/etc/localtime"),
        *(str(Path(mpickpt.__file__).parent), sys.prefix, sys.base_prefix),
        *sysconfig.get_paths().values(),
        *map(os.path.realpath, sysconfig.get_paths().values()),
        "/usr/share/zoneinfo",
    }
)
AREA = "area"  # all that a case may touch is in it
CHANGES = {
    *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink"),
    *("os.chmod", "os.truncate", "os.chown", "os.listdir", "os.scandir"),
}


class Watch:
    """Notes what the process opens and changes outside the run."""

    def __init__(self, folder: Path) -> None:
        self.allowed = (os.path.join(os.path.realpath(folder), AREA, ""), *HARMLESS)
        self.is_on = False
        self.outside: list[str] = []
        sys.addaudithook(self.hook)

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Take an audit event of the interpreter."""
        if not self.is_on or (event != "open" and event not in CHANGES):
            return
        flags = arguments[2] if event == "open" else 0
        for path in arguments[: 2 if event == "os.rename" else 1]:
            if not isinstance(path, str | bytes | os.PathLike):
                continue
            text = os.fsdecode(path)
            folder, name = os.path.split(os.path.abspath(text))
            follows = event == "open" and not (flags or 0) & os.O_NOFOLLOW
            follows |= event in ("os.listdir", "os.scandir")
            real = os.path.join(os.path.realpath(folder), name)
            real = os.path.realpath(text) if follows else real
            if not (real + "/").startswith(self.allowed):
                self.outside.append(f"{event} {text}")


class FakeClock:
    """Time that passes while somebody sleeps, for those who watch a lease."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(0.0, seconds)


def memory_of_process(field: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith(field))
    return int(line.split()[1]) << 10


def reset_peak() -> None:
    """Let the peak of resident memory begin anew."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


class Judge:
    """Runs readers on forged runs and says what was wrong."""

    def __init__(self, base: Path, folder: Path) -> None:
        self.pristine = base / "run"
        self.outside = folder / "outside"
        self.run = folder / AREA / "run"
        self.baseline: dict[str, Any] = {}
        self.watch = Watch(folder)
        self.base_nbytes = 0
        self.n_reads = 0

    def prepare(self) -> Path:
        """Return a fresh copy of the run, beside what nobody may touch."""
        for path in (self.run.parent, self.outside):
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
        shutil.copytree(self.pristine, self.run)
        for name in ("secret", "rank00000-00000000.h5", "step-0000000001.json"):
            (self.outside / name).write_text("what no reader may open")
        return self.run

    def take_baseline(self) -> None:
        """Read the run as it was saved."""
        for name, read in READ_ONLY.items():
            self.baseline[name] = read(self.prepare())
        gc.collect()
        self.base_nbytes = memory_of_process("VmRSS")

    def judged(self, forgery: Forgery) -> dict[str, str]:
        """Return the complaints about all runs of one case."""
        found: dict[str, str] = {}
        for turn in range(forgery.turns):
            writes = forgery.always_writes or turn % EVERY_NTH_WRITES == 0
            try:
                forgery.forge(self.prepare(), self.outside, turn)
            except forgery.impossible:
                continue
            before = self.snapshot()
            for name, read in READ_ONLY.items():
                if forgery.readers and name not in forgery.readers:
                    continue
                self.attempt(forgery, turn, name, read, found)
            for name, read in WRITING.items() if writes and not forgery.readers else ():
                forgery.forge(self.prepare(), self.outside, turn)
                self.attempt(forgery, turn, name, read, found)
            if self.snapshot() != before:
                found.setdefault("rubbish", f"turn {turn}: the outside was changed")
        return found

    def snapshot(self) -> list[tuple[str, int]]:
        """Return what lies outside."""
        paths = sorted(self.outside.rglob("*"))
        return [(str(path), path.lstat().st_size) for path in paths]

    def attempt(
        self,
        forgery: Forgery,
        turn: int,
        name: str,
        read: Callable[[Path], Any],
        found: dict[str, str],
    ) -> None:
        """Let one reader read; note what was wrong."""
        self.n_reads += 1
        faulthandler.dump_traceback_later(HANGING_S, exit=True)
        reset_peak()
        self.watch.outside.clear()
        got, refused, seconds = None, False, time.process_time()
        where, begun = f"turn {turn}, {name}", time.monotonic()
        self.watch.is_on = True
        try:
            got = read(self.run)
        except CheckpointError as error:
            self.watch.is_on = False
            refused = True
            if len(str(error)) > LONGEST_MESSAGE:
                self.say(found, "wrong_error", f"{where}: {len(str(error))} characters")
        except BaseException as error:
            self.watch.is_on = False
            refused = True
            told = "".join(traceback.format_exception(error)[-3:])[-1500:]
            column = "lost" if str(error).startswith("lost") else "wrong_error"
            self.say(found, column, f"{where}: {told}")
        finally:
            self.watch.is_on = False
            faulthandler.cancel_dump_traceback_later()
        seconds = time.process_time() - seconds
        if os.environ.get("HOSTILE_VERBOSE"):
            took = f"{seconds:.2f} s CPU, {time.monotonic() - begun:.2f} s"
            print(where, took, "refused" if refused else "")
        self.judge_process(forgery, where, seconds, found)
        is_known = name in self.baseline and not refused
        if forgery.keeps_bytes and is_known and got != self.baseline[name]:
            other = _first_other(got, self.baseline[name])
            self.say(found, "silent", f"{where}: {other}")
        if forgery.is_harmless and refused and name in READ_ONLY:
            self.say(found, "wrong_error", f"{where}: refused what is harmless")

    def judge_process(
        self, forgery: Forgery, where: str, seconds: float, found: dict[str, str]
    ) -> None:
        """Note what the process took, and what it opened."""
        if seconds > CPU_S:
            self.say(found, "hung", f"{where}: {seconds:.1f} s")
        extra = memory_of_process("VmHWM") - self.base_nbytes
        if extra > EXTRA_NBYTES:
            self.say(found, "hung", f"{where}: {extra >> 20} MiB more")
        if self.watch.outside and not forgery.leads_out:
            self.say(found, "rubbish", f"{where}: {sorted(set(self.watch.outside))}")

    def say(self, found: dict[str, str], column: str, text: str) -> None:
        """Note the first complaint of each kind, and count the others."""
        if column not in found:
            found[column] = text


def _first_other(got: dict[str, Any], expected: dict[str, Any]) -> str:
    keys = [*expected, *got]
    other = next((k for k in keys if got.get(k) != expected.get(k)), None)
    return f"{other!r}: {got.get(other)!r}, not {expected.get(other)!r}"[:500]


def main() -> None:
    base, folder, results, chosen = map(Path, sys.argv[1:])
    lease.time = FakeClock()
    wanted = set(json.loads(chosen.read_text()))
    judge = Judge(base, folder)
    judge.take_baseline()
    assert "h5py" not in sys.modules or not BLOCKED
    space = memory_of_process("VmSize") + ADDRESS_SPACE_NBYTES
    resource.setrlimit(resource.RLIMIT_AS, (space, space))
    threads = threading.active_count()
    with results.open("a") as out:
        for forgery in CASES:
            if forgery.name in wanted:
                out.write(json.dumps(["begin", forgery.name]) + "\n")
                out.flush()
                before = judge.n_reads
                verdict = judge.judged(forgery)
                if threading.active_count() > threads + 20:
                    verdict.setdefault("hung", "threads stay behind")
                line = [forgery.name, verdict, judge.n_reads - before]
                out.write(json.dumps(line) + "\n")
                out.flush()


BLOCKED = False

if __name__ == "__main__":
    if sys.argv[1] == "--save":
        save_run(Path(sys.argv[2]) / "run")
    else:
        main()

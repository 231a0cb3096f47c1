"""The system calls of a save that a file system can refuse, as they were recorded.

`python -m tests.faults.errors_calls` records good saves of every mode with strace and
writes what it saw to ``errors_calls.txt``, from which the cases are made. A test says
when the two do not agree, so that no new call goes untested.
"""

import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

from tests.mpi_launch import finish, start

LIST = Path(__file__).with_name("errors_calls.txt")
PROGRAM = Path(__file__).parent / "programs" / "errors_saves.py"
MODES = ("sync", "overwrite", "poll", "thread", "manager", "background", "rewind")
SIZE = 4
RANKS = (0, 2, 3)
TIMEOUT_S = 60

WRITING, LOOKING = "writes", "looks"

_MARK = "/moment-of-the-errors-suite/"
_LINE = re.compile(r"(\d+)\s+([a-z]\w*)\((.*)")
_QUOTED = re.compile(r'"([^"]*)"')
_DESCRIPTOR = re.compile(r"\d+<([^>]*)>")
# What a file system has no say in, and what Python asks of a file that it opened.
_NEVER_REFUSED = frozenset({"fcntl", "ioctl", "lseek", "mmap", "poll"})
_READING = frozenset(
    {"newfstatat", "statx", "stat", "lstat", "fstat", "getdents64", "readlink"}
    | {"statfs", "fstatfs", "read", "pread64", "preadv", "preadv2", "flock", "access"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One system call of one rank, and how strace gets at it and no other.

    Attributes
    ----------
    mode, rank, call
        Which save, whose, and the name of the system call.
    number : int
        Of the calls of that name on that path, the how many-eth; 0 for all of them.
    path : str
        Relative to the run directory; "." for itself.
    kind : {"writes", "looks"}
        Whether the save changes something by it, or reads only.
    way : {"all", "main", "work", "write", "prepared", "publish"}
        What to attach to: all threads before the save, the main thread alone, or
        alone the thread that comes to this moment, then.
    when : str
        Which of the calls there it is, as of ``strace -e inject``.
    """

    mode: str
    rank: int
    call: str
    number: int
    path: str
    kind: str
    way: str
    when: str

    @property
    def name(self) -> str:
        """Name of the call in those of the cases."""
        which = f"{self.call}-{self.number or 'all'}"
        return f"{self.mode}/rank{self.rank}/{which}/{self.path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """A line of strace about the run directory, or a mark."""

    thread: int
    call: str
    path: str
    kind: str


def listed_calls() -> list[Call]:
    """Return the calls of the list, in the order in which they are made."""
    found = []
    for line in LIST.read_text().splitlines():
        mode, rank, call, number, path, kind, way, when = line.split(" ")
        found.append(
            Call(
                mode=mode,
                rank=int(rank),
                call=call,
                number=int(number),
                path=path,
                kind=kind,
                way=way,
                when=when,
            )
        )
    return found


def recorded_calls(mode: str, folder: Path) -> list[Call]:
    """Save without a fault, under strace; return the calls that were seen."""
    cases = folder / "cases"
    cases.write_text(json.dumps([{"name": "first"}, {"name": "recorded"}]))
    arguments = ["-m", "mpi4py", str(PROGRAM), mode, str(folder), str(cases)]
    outcome = finish(start(arguments, size=SIZE), TIMEOUT_S)
    assert outcome.returncode == 0, outcome.output[-5000:]
    said = [json.loads(line) for line in (folder / "said").open()][-1]
    return [
        call
        for rank in RANKS
        for call in calls_of(said["ranks"][rank]["hits"], mode, rank, said["run"])
    ]


def calls_of(lines: Iterable[str], mode: str, rank: int, run: str) -> list[Call]:
    """Return the calls that strace's lines tell of, each with a way to get at it."""
    seen = list(_seen(lines, run))
    own_shard = re.compile(rf"step-\d+/rank{rank:05d}-\d+\.h5(\.tmp)?")
    polled = [s for s in seen if s.call == "newfstatat" and own_shard.fullmatch(s.path)]
    seen = [one for one in seen if one not in set(polled)]
    main = seen[0].thread if seen else 0
    numbers: Counter[tuple[str, str]] = Counter()
    calls = []
    for place, one in enumerate(seen):
        if one.call == "mark":
            continue
        numbers[one.call, one.path] += 1
        way, when = _way_to(seen, place, main)
        calls.append(
            Call(
                mode=mode,
                rank=rank,
                call=one.call,
                number=numbers[one.call, one.path],
                path=one.path,
                kind=one.kind,
                way=way,
                when=str(when),
            )
        )
    # How often a rank looks how far its shard has grown depends on time alone.
    for path in sorted({one.path for one in polled}):
        calls.append(
            Call(
                mode=mode,
                rank=rank,
                call="newfstatat",
                number=0,
                path=path,
                kind=LOOKING,
                way="all",
                when="1+",
            )
        )
    return calls


def _way_to(seen: list[_Seen], place: int, main: int) -> tuple[str, int]:
    """Return what to attach to, and the number there, for one of the calls."""
    target = seen[place]
    like = [
        (n, one.thread)
        for n, one in enumerate(seen)
        if (one.call, one.path) == (target.call, target.path)
    ]
    count: Counter[int] = Counter()
    counted = []
    for n, thread in like:
        count[thread] += 1
        counted.append((n, count[thread]))
    own = dict(counted)[place]
    if next(n for n, number in counted if number == own) == place:
        return "all", own
    since = {main: ("main", -1)}
    for n, one in enumerate(seen[:place]):
        if one.call == "mark":
            since[one.thread] = (one.path, n)
    if target.thread not in since:
        raise ValueError(f"no moment before {target} to attach to its thread")
    way, begin = since[target.thread]
    number = sum(n > begin and n <= place and t == target.thread for n, t in like)
    return way, number


def _seen(lines: Iterable[str], run: str) -> Iterator[_Seen]:
    """Parse what is about the run directory, and the marks."""
    opened: dict[tuple[int, str], str] = {}
    beating: set[int] = set()
    for line in lines:
        match = _LINE.match(line)
        if match is None or match[2] in _NEVER_REFUSED:
            continue
        thread, call, arguments = int(match[1]), match[2], match[3]
        path = _path_of(call, arguments)
        if path == f"{_MARK}beat":
            beating.add(thread)
        if thread in beating:
            continue
        if path.startswith(_MARK):
            yield _Seen(thread=thread, call="mark", path=path[len(_MARK) :], kind="")
            continue
        if path != run and not path.startswith(f"{run}/") and call != "memfd_create":
            continue
        kind = LOOKING if call in _READING else WRITING
        if call == "openat":
            reads = "O_NONBLOCK" in arguments or not re.search(
                "O_CREAT|O_DIRECTORY|O_WRONLY|O_RDWR", arguments
            )
            kind = opened[thread, path] = LOOKING if reads else WRITING
        elif call == "close":
            kind = opened.get((thread, path), kind)
        relative = path[len(run) + 1 :] or "."
        yield _Seen(thread=thread, call=call, path=relative, kind=kind)


def _path_of(call: str, arguments: str) -> str:
    by_descriptor = _DESCRIPTOR.match(arguments)
    if by_descriptor:
        return by_descriptor[1]
    quoted = _QUOTED.search(arguments)
    return quoted[1] if quoted else ""


def lines_of(calls: Iterable[Call]) -> str:
    """Return the list as it is kept in the file."""
    return "".join(" ".join(map(str, astuple(call))) + "\n" for call in calls)


def main() -> int:
    """Record all modes and write the list; keep it where two recordings differ."""
    calls: list[Call] = []
    with tempfile.TemporaryDirectory() as name:
        for mode in MODES:
            found = []
            for turn in ("a", "b"):
                folder = Path(name, mode + turn)
                folder.mkdir()
                found.append(recorded_calls(mode, folder))
            if found[0] != found[1]:
                print(f"{mode}: two recordings differ", file=sys.stderr)
                print(*(set(found[0]) ^ set(found[1])), sep="\n", file=sys.stderr)
                return 1
            calls += found[0]
    LIST.write_text(lines_of(calls))
    print(f"{LIST}: {len(calls)} calls")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Watches what this process does to files below a directory, call by call.

The functions of `os` are replaced meanwhile. Ranks may be threads: a thread that a rank
starts counts as that rank, so a label means the same call in every run.
"""

import contextlib
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.power_loss_states import (
    ROOT,
    Change,
    Naming,
    Operation,
    Promise,
    Recording,
    Syncing,
    Tree,
    Writing,
)

# A beat of the lease comes when it comes.
UNCOUNTED_THREAD = "mpickpt-lease"

_SHORTER = (
    (re.compile(r"step-0*(\d+)"), r"step\1"),
    (re.compile(r"rank0*(\d+)-[0-9a-f]{8}\.h5"), r"shard\1"),
    (re.compile(r"layout-[0-9a-f]{16}\.h5"), "layout"),
    (re.compile(r"receipts-[0-9a-f]{8}\.json"), "receipts"),
    (re.compile(r"\.rejected-[0-9a-f]{8}"), ".rejected"),
    (re.compile(r"\.[0-9a-f]{8}\.tmp"), ".tmp"),
    (re.compile(r"\.json"), ""),
    (re.compile(r"^run(/|$)"), ""),
    (re.compile("/"), ":"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call that changes or syncs something.

    Attributes
    ----------
    kind : str
        Name of the function; "create" for an opening that makes the file.
    path, target : str
        Relative to the directory; `target` of a rename or link.
    label : str
        ``rank2/step2:shard2.tmp/pwrite-1``: who, what, and for the how many-th time.
    descriptor : int or None
        Of the open file, after a "create" too.
    offset, content
        Of a write.
    """

    kind: str
    path: str
    label: str
    target: str = ""
    descriptor: int | None = None
    offset: int = 0
    content: bytes = b""


Around = Callable[[Call, Callable[[], Any]], Any]


class Hooks:
    """Leads every call below `root` through `around`.

    Parameters
    ----------
    root : Path
        The directory.
    around : callable of Call and function
        Makes the call by calling the function, and returns what it returned; or
        raises.
    """

    def __init__(self, root: Path, around: Around) -> None:
        self._root = os.path.abspath(root)
        self._around = around
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._paths: dict[int, str] = {}
        self._real: dict[str, Any] = {}

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Replace the functions of `os` meanwhile."""
        replaced: list[tuple[Any, str, Any]] = [
            (os, name, getattr(self, f"_{name}"))
            for name in ("open", "close", "write", "pwrite", "rename", "link")
        ]
        one_path = ("unlink", "remove", "mkdir", "rmdir")
        replaced += [(os, name, self._of_path(name)) for name in one_path]
        replaced += [(os, n, self._of_file(n)) for n in ("fsync", "fdatasync")]
        replaced += [(os, "ftruncate", self._ftruncate)]
        replaced += [(os, "replace", self._rename)]
        replaced += [(Path, "write_bytes", _write_bytes)]
        replaced += [(threading.Thread, "start", _start_as_the_same_rank)]
        self._real = {name: getattr(os, name) for o, name, _ in replaced if o is os}
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
        try:
            for owner, name, function in replaced:
                setattr(owner, name, function)
            yield
        finally:
            for owner, name, function in before:
                setattr(owner, name, function)

    def _relative(self, path: Any) -> str | None:
        absolute = os.path.abspath(os.fspath(path))
        if absolute == self._root:
            return "."
        inside = absolute.startswith(self._root + "/")
        return absolute[len(self._root) + 1 :] if inside else None

    def _make(self, kind: str, path: str, call: Callable[[], Any], **more: Any) -> Any:
        if threading.current_thread().name == UNCOUNTED_THREAD:
            return call()
        place = path
        for pattern, short in _SHORTER:
            place = pattern.sub(short, place)
        label = f"{_actor()}/{place or 'run'}/{kind}"
        with self._lock:
            self._counts[label] += 1
            label += f"-{self._counts[label]}"
        return self._around(Call(kind=kind, path=path, label=label, **more), call)

    def _open(self, path: Any, flags: int, *rest: Any, **named: Any) -> int:
        def call() -> int:
            descriptor: int = self._real["open"](path, flags, *rest, **named)
            if relative is not None:
                self._paths[descriptor] = relative
            return descriptor

        relative = None if isinstance(path, int) else self._relative(path)
        if relative is None or not flags & os.O_CREAT or os.path.lexists(path):
            assert relative is None or not flags & os.O_TRUNC, "nobody does that"
            return call()
        made: int = self._make("create", relative, call)
        return made

    def _close(self, descriptor: int) -> None:
        self._paths.pop(descriptor, None)
        self._real["close"](descriptor)

    def _write(self, descriptor: int, content: Any) -> int:
        def call() -> int:
            count: int = self._real["write"](descriptor, content)
            return count

        path = self._paths.get(descriptor)
        if path is None:
            return call()
        made: int = self._make(
            "write",
            path,
            call,
            descriptor=descriptor,
            offset=os.lseek(descriptor, 0, os.SEEK_CUR),
            content=bytes(content),
        )
        return made

    def _pwrite(self, descriptor: int, content: Any, offset: int) -> int:
        def call() -> int:
            count: int = self._real["pwrite"](descriptor, content, offset)
            return count

        path = self._paths.get(descriptor)
        if path is None or not len(content):
            return call()
        made: int = self._make(
            "pwrite",
            path,
            call,
            descriptor=descriptor,
            offset=offset,
            content=bytes(content),
        )
        return made

    def _ftruncate(self, descriptor: int, length: int) -> None:
        path = self._paths.get(descriptor)
        call = self._calling("ftruncate", descriptor, length)
        if path is None:
            return call()
        more = {"descriptor": descriptor, "offset": length}
        return self._make("ftruncate", path, call, **more)

    def _rename(self, source: Any, target: Any) -> None:
        return self._of_two("rename", source, target)

    def _link(self, source: Any, target: Any, **named: Any) -> None:
        return self._of_two("link", source, target, **named)

    def _of_two(self, name: str, source: Any, target: Any, **named: Any) -> None:
        path, other = self._relative(source), self._relative(target)
        call = self._calling(name, source, target, **named)
        if path is None or other is None:
            assert path is other, "nothing crosses the border of the directory"
            return call()
        return self._make(name, path, call, target=other)

    def _of_path(self, name: str) -> Callable[..., Any]:
        kind = "unlink" if name == "remove" else name

        def replacement(path: Any, *rest: Any, **named: Any) -> Any:
            relative = self._relative(path)
            call = self._calling(name, path, *rest, **named)
            return call() if relative is None else self._make(kind, relative, call)

        return replacement

    def _of_file(self, name: str) -> Callable[[int], Any]:
        def replacement(descriptor: int) -> Any:
            path = self._paths.get(descriptor)
            call = self._calling(name, descriptor)
            if path is None:
                return call()
            return self._make("fsync", path, call, descriptor=descriptor)

        return replacement

    def _calling(self, name: str, *arguments: Any, **named: Any) -> Callable[[], Any]:
        return lambda: self._real[name](*arguments, **named)


class Recorder:
    """Records what is done below a directory, one call at a time.

    Parameters
    ----------
    root : Path
        The directory; what is in it counts as durable.
    dies_before : str or None
        Label of a call that is not made, nor is any after it: as if the process had
        been killed, while the system lives on.
    """

    def __init__(self, root: Path, *, dies_before: str | None = None) -> None:
        self.labels: list[str] = []
        self.dies_before = dies_before
        self.is_dead = False
        self._root = root
        self._lock = threading.RLock()
        self._start = tree_of(root)
        self._now = self._start.copy()
        self._next = 1 + max([*self._now.contents, *map(abs, self._now.names)])
        self._operations: list[Operation] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator["Recorder"]:
        """Record meanwhile."""
        with Hooks(self._root, self._record).installed():
            yield self

    def promise(self, stage: int) -> None:
        """Note that the program was told that something is durable."""
        with self._lock:
            if not self.is_dead:
                label = f"promise-{stage}"
                self._operations.append(Promise(label=label, stage=stage))

    def revive(self) -> None:
        """Let calls be made again: the next process."""
        self.is_dead, self.dies_before = False, None

    @property
    def result(self) -> Recording:
        """What was recorded; complete, since it leads to what is there."""
        recording = Recording(start=self._start, operations=tuple(self._operations))
        assert recording.final() == tree_of(self._root).state(), "a call was missed"
        return recording

    def _record(self, call: Call, make: Callable[[], Any]) -> Any:
        with self._lock:
            if call.label == self.dies_before:
                self.is_dead = True
            if self.is_dead:
                raise OSError(5, "this process was killed")
            # Before it is made, since an unlinked path leads nowhere after.
            operation = self._operation(call)
            made = make()
            self.labels.append(call.label)
            if call.kind in ("write", "pwrite"):
                assert made == len(call.content), "a short write"
            self._operations.append(operation)
            return made

    def _operation(self, call: Call) -> Operation:
        if call.kind == "fsync":
            return Syncing(label=call.label, node=self._node_of(call))
        if call.kind in ("write", "pwrite", "ftruncate"):
            content = None if call.kind == "ftruncate" else call.content
            return Writing(
                label=call.label,
                node=self._node_of(call),
                offset=call.offset,
                content=content,
            )
        changes = self._changes(call)
        for directory, name, node in changes:
            inner = self._now.names[directory]
            inner.pop(name, None)
            if node is not None:
                inner[name] = node
        return Naming(label=call.label, changes=changes)

    def _changes(self, call: Call) -> tuple[Change, ...]:
        directory, name, node = self._walk(call.path)
        if call.kind in ("create", "mkdir"):
            node, self._next = self._next, self._next + 1
            if call.kind == "mkdir":
                node = -node
                self._now.names[node] = {}
            return ((directory, name, node),)
        if call.kind in ("unlink", "rmdir"):
            return ((directory, name, None),)
        other, other_name, _ = self._walk(call.target)
        added = ((other, other_name, node),)
        return added if call.kind == "link" else ((directory, name, None), *added)

    def _node_of(self, call: Call) -> int:
        node = self._walk(call.path)[2]
        # A file that was renamed or removed while it was open is not asked for.
        assert node is not None, f"{call.path} is gone"
        return node

    def _walk(self, path: str) -> tuple[int, str, int | None]:
        if path == ".":
            return ROOT, "", ROOT
        *parents, name = path.split("/")
        directory = ROOT
        for parent in parents:
            directory = self._now.names[directory][parent]
        return directory, name, self._now.names[directory].get(name)


def tree_of(root: Path) -> Tree:
    """Return what lies below a directory; directories have negative numbers."""
    tree = Tree()
    nodes = {str(root): ROOT}
    count = 0
    for folder, directories, files in os.walk(root):
        inner = tree.names[nodes[folder]]
        for name in directories:
            count += 1
            nodes[f"{folder}/{name}"] = inner[name] = -count
            tree.names[-count] = {}
        for name in files:
            count += 1
            inner[name] = count
            tree.contents[count] = Path(folder, name).read_bytes()
    return tree


def write_tree(state: dict[str, bytes | None], root: Path) -> None:
    """Make a directory that holds a state."""
    root.mkdir()
    for path, content in sorted(state.items()):
        if content is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(content)


def act_as_rank(rank: int) -> None:
    """Have what the calling thread does count as done by a rank."""
    threading.current_thread().rank_of_test = rank  # type: ignore[attr-defined]


def _actor() -> str:
    rank = getattr(threading.current_thread(), "rank_of_test", None)
    return "alone" if rank is None else f"rank{rank}"


_start_thread = threading.Thread.start


def _start_as_the_same_rank(thread: threading.Thread) -> None:
    rank = getattr(threading.current_thread(), "rank_of_test", None)
    thread.rank_of_test = rank  # type: ignore[attr-defined]
    _start_thread(thread)


def _write_bytes(path: Path, content: bytes) -> int:
    """Write a file through functions of `os`, which `Path.write_bytes` does not."""
    if path.exists():
        path.unlink()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        return os.write(descriptor, content)
    finally:
        os.close(descriptor)

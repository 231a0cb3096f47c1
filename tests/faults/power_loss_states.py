"""What may be on a disk after a power loss: a model and all it allows; pure.

The model promises no more than POSIX does. The bytes of a file are durable once the
file was synced after they were written; a change of a name in a directory once that
directory was synced. Of what was not synced, any part may be there and any other not:
of the changes of names any subset; of a file's bytes none, zeros, the first ones alone,
every other block, or all. A rename within a directory is there as a whole or not.
"""

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

BLOCK_NBYTES = 4096
ROOT = 0
LEVELS = ("all", "none", "zeros", "short", "torn")

# By path; None is a directory.
State = dict[str, bytes | None]
Change = tuple[int, str, int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """Changes of names: (directory, name, what it leads to or None), all at once."""

    label: str
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """Bytes that went to a file; None cuts the file at the offset."""

    label: str
    node: int
    offset: int
    content: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Syncing:
    """A sync of a file or a directory that has returned."""

    label: str
    node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """From here on the program was told that its `stage`-th step is durable."""

    label: str
    stage: int


Operation = Naming | Writing | Syncing | Promise


@dataclass(slots=True)
class Tree:
    """Directories and files by number; `ROOT` is the directory they lie in."""

    names: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    contents: dict[int, bytes] = field(default_factory=dict)

    def copy(self) -> "Tree":
        names = {node: dict(inner) for node, inner in self.names.items()}
        return Tree(names, dict(self.contents))

    def state(self) -> State:
        """Return what can be reached from the root."""
        return dict(self._below(ROOT, ""))

    def _below(self, directory: int, prefix: str) -> Iterator[tuple[str, bytes | None]]:
        for name, node in self.names.get(directory, {}).items():
            if node in self.names:
                yield prefix + name, None
                yield from self._below(node, f"{prefix}{name}/")
            else:
                yield prefix + name, self.contents.get(node, b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What was durable at the start, and what was done to it in order."""

    start: Tree
    operations: tuple[Operation, ...]

    def without(self, label_part: str) -> "Recording":
        """Return it as if operations with a part of their label had been left out."""
        kept = tuple(op for op in self.operations if label_part not in op.label)
        assert len(kept) < len(self.operations), f"nothing is called {label_part}"
        return Recording(start=self.start, operations=kept)

    def stage(self, moment: int) -> int:
        """Return how far the promises had come before an operation."""
        done = self.operations[:moment]
        return max((op.stage for op in done if isinstance(op, Promise)), default=0)

    def final(self) -> State:
        """Return what there is when nothing is lost."""
        everything = frozenset(range(len(self.operations)))
        return _tree(self, len(self.operations), everything, {}).state()


def crash_states(
    recording: Recording, moment: int, *, most: int = 128, samples: int = 24
) -> Iterator[State]:
    """Yield what a power loss just before an operation may leave, each once.

    Parameters
    ----------
    recording : Recording
        What was done.
    moment : int
        Number of operations that were done by then.
    most : int
        Up to as many combinations all are tried. Else the extreme ones are, and a
        sample whose seed is the moment.
    samples : int
        How many are drawn besides the extreme ones.
    """
    open_names = _volatile_names(recording, moment)
    files = _volatile_files(recording, moment)
    seen = set()
    for kept, levels in _choices(open_names, files, moment, most, samples):
        state = _tree(recording, moment, kept, levels).state()
        key = frozenset(state.items())
        if key not in seen:
            seen.add(key)
            yield state


def _volatile_names(recording: Recording, moment: int) -> list[int]:
    """Return the changes of names that no sync of all their directories followed."""
    return [
        index
        for index, op in enumerate(recording.operations[:moment])
        if isinstance(op, Naming)
        and not all(
            _is_synced_between(recording, directory, index, moment)
            for directory, _, _ in op.changes
        )
    ]


def _volatile_files(recording: Recording, moment: int) -> list[int]:
    """Return the files with bytes that no sync followed."""
    return sorted(
        {
            op.node
            for index, op in enumerate(recording.operations[:moment])
            if isinstance(op, Writing)
            and not _is_synced_between(recording, op.node, index, moment)
        }
    )


def _is_synced_between(recording: Recording, node: int, start: int, stop: int) -> bool:
    return any(
        isinstance(op, Syncing) and op.node == node
        for op in recording.operations[start + 1 : stop]
    )


def _choices(
    names: Sequence[int], files: Sequence[int], seed: int, most: int, samples: int
) -> Iterator[tuple[frozenset[int], dict[int, str]]]:
    if 2 ** len(names) * len(LEVELS) ** len(files) <= most:
        for mask in itertools.product((True, False), repeat=len(names)):
            kept = frozenset(itertools.compress(names, mask))
            for levels in itertools.product(LEVELS, repeat=len(files)):
                yield kept, dict(zip(files, levels, strict=True))
        return
    everything = frozenset(names)
    for kept in (
        everything,
        frozenset[int](),
        *(everything - {name} for name in names),
        *(frozenset({name}) for name in names),
    ):
        for level in LEVELS:
            yield kept, dict.fromkeys(files, level)
    for file, level in itertools.product(files, LEVELS[1:]):
        yield everything, {**dict.fromkeys(files, "all"), file: level}
        yield everything, {**dict.fromkeys(files, level), file: "all"}
    draw = random.Random(seed)
    for _ in range(samples):
        kept = frozenset(name for name in names if draw.random() < 0.5)
        yield kept, {file: draw.choice(LEVELS) for file in files}


def _tree(
    recording: Recording, moment: int, kept: frozenset[int], levels: dict[int, str]
) -> Tree:
    tree = recording.start.copy()
    for index, op in enumerate(recording.operations[:moment]):
        if isinstance(op, Naming):
            for directory, name, node in op.changes:
                if node is not None and node < 0:
                    tree.names.setdefault(node, {})
                if index in kept or _is_synced_between(
                    recording, directory, index, moment
                ):
                    _rename(tree, directory, name, node)
        elif isinstance(op, Writing):
            is_durable = _is_synced_between(recording, op.node, index, moment)
            _write(tree, op, "all" if is_durable else levels.get(op.node, "all"))
    for node, level in levels.items():
        if level == "short":
            tree.contents[node] = _shortened(recording, moment, node, tree)
    return tree


def _rename(tree: Tree, directory: int, name: str, node: int | None) -> None:
    inner = tree.names.setdefault(directory, {})
    inner.pop(name, None)
    if node is not None:
        inner[name] = node


def _write(tree: Tree, op: Writing, level: str) -> None:
    if level != "none":
        before = tree.contents.get(op.node, b"")
        tree.contents[op.node] = _written(before, op, level)


def _written(before: bytes, op: Writing, level: str) -> bytes:
    if op.content is None:
        return before[: op.offset].ljust(op.offset, b"\0")
    content = bytearray(op.content)
    if level == "zeros":
        content = bytearray(len(content))
    elif level == "torn":
        first = -op.offset % BLOCK_NBYTES
        for start in range(first, len(content), 2 * BLOCK_NBYTES):
            stop = min(start + BLOCK_NBYTES, len(content))
            content[start:stop] = bytes(stop - start)
    after = bytearray(before.ljust(op.offset, b"\0"))
    after[op.offset : op.offset + len(content)] = content
    return bytes(after)


def _shortened(recording: Recording, moment: int, node: int, tree: Tree) -> bytes:
    """Return the first half of what was written since the last sync."""
    content = tree.contents.get(node, b"")
    durable = max(
        (
            op.offset + len(op.content or b"")
            for index, op in enumerate(recording.operations[:moment])
            if isinstance(op, Writing)
            and op.node == node
            and _is_synced_between(recording, node, index, moment)
        ),
        default=0,
    )
    return content[: durable + math.ceil((len(content) - durable) / 2)]

"""Ways to damage a checkpoint at rest, and what each reader must say of it.

A damage is done to a copy of a run of two checkpoints: step 1, which stays whole, and
step 2. `library` is the folder of `save_library`: the run, and shards of other saves.
"""

import itertools
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpickpt import step_path
from mpickpt.storage.catalog import read_manifest
from tests.crash.small_state import (
    SMALL_BLOCKS,
    flip_bit,
    regions_of,
    save,
    state_of,
)
from tests.ranks_as_threads import run_ranks
from tests.unit.forging import forge_manifest

SIZE = 4
RANK = 2
ROWS = 26_000  # 416 kB: HDF5 aligns such an array, so that the shard has padding
OLD, NEW = 1, 2
OTHER_STATE = 102  # a step whose numbers differ from those of `NEW`
REGIONS = (
    "metadata 0",
    "array model/half",
    "array own",
    "index",
    "padding 4",
    "array model/w",
    "metadata 6",
    "table",
)

CORRUPT = ("CorruptShardError",)
INCOMPLETE = ("IncompleteCheckpointError",)
EITHER = CORRUPT + INCOMPLETE
MANIFEST = ("ManifestError",)
NOT_FOUND = ("CheckpointNotFoundError",)
STORAGE = ("StorageError",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One damage.

    Attributes
    ----------
    name : str
        Unique and the same at every run.
    do : callable of (library, checkpoint)
        Does it to the checkpoint of step 2; returns the files that may be blamed.
    expected : tuple of str
        Classes of error that a reader of the damaged file may raise; none where the
        damage is harmless.
    spares : tuple of str
        Readers that need not see it: they must not use the damaged bytes.
    falls_back : bool
        Whether `restore_latest` goes on from step 1; else it must raise.
    """

    name: str
    do: Callable[[Path, Path], list[Path]]
    expected: tuple[str, ...]
    spares: tuple[str, ...] = ()
    falls_back: bool = True
    in_ci: bool = False


def save_library(library: Path) -> None:
    """Save the run, and what shards are swapped with."""
    for step in (OLD, NEW):
        save(step_path(library / "run", step), step=step, size=SIZE, rows=ROWS)
    save(library / "equal", step=NEW, size=SIZE, rows=ROWS)
    save(library / "three ranks", step=NEW, size=3, rows=ROWS)
    save_other_state(library / "other state")


def save_other_state(path: Path) -> None:
    """Save other numbers as the same step."""
    from mpickpt import save_sharded

    def save_rank(comm: Any) -> None:
        tree = state_of(comm.rank, OTHER_STATE, ROWS)
        save_sharded(tree, path, step=NEW, comm=comm, options=SMALL_BLOCKS)

    outcomes = run_ranks(SIZE, save_rank)
    assert outcomes == [None] * SIZE, outcomes


def damages() -> list[Damage]:
    """Return all damages, in a fixed order."""
    return [
        *_flipped_bits(),
        *_cut(),
        *_grown(),
        *_of_other_saves(),
        *_wrong_manifests(),
        *_wrong_digests(),
        *_power_losses(),
        *_no_files(),
    ]


def shard(checkpoint: Path, rank: int) -> Path:
    """Return the path of a shard."""
    return checkpoint / read_manifest(checkpoint).shards[rank].path


def layout(checkpoint: Path) -> Path:
    """Return the path of the layout file."""
    record = read_manifest(checkpoint).layout
    assert record is not None
    return checkpoint / record.path


def manifest(checkpoint: Path) -> Path:
    """Return the path of the manifest."""
    return checkpoint / "manifest.json"


# `open` and a load of some arrays need no layout file.
_NEEDS_NO_LAYOUT = ("reshard", "open")
_PLACES = {"first": 0.0, "middle": 0.5, "last": 1.0}


def _flipped_bits() -> Iterator[Damage]:
    for region, (place, part), bit in itertools.product(
        REGIONS, _PLACES.items(), (0, 7)
    ):

        def flip(_: Path, checkpoint: Path, r=region, p=part, b=bit) -> list[Path]:
            low, high = regions_of(checkpoint, RANK)[r]
            path = shard(checkpoint, RANK)
            flip_bit(path, low + int(p * (high - 1 - low)), b)
            return [path]

        name = f"bit {bit}, {place} byte of {region.replace('/', '.')}"
        in_ci = (place, bit) == ("middle", 0) or (region == "table" and bit == 0)
        yield Damage(name=name, do=flip, expected=CORRUPT, in_ci=in_ci)
    for (place, part), bit in itertools.product(_PLACES.items(), (0, 7)):

        def flip_layout(_: Path, checkpoint: Path, p=part, b=bit) -> list[Path]:
            path = layout(checkpoint)
            flip_bit(path, int(p * (path.stat().st_size - 1)), b)
            return [path]

        yield Damage(
            name=f"bit {bit}, {place} byte of layout",
            do=flip_layout,
            expected=CORRUPT,
            spares=_NEEDS_NO_LAYOUT,
            in_ci=(place, bit) == ("middle", 0),
        )
    for part in range(0, 100, 9):

        def flip_manifest(_: Path, checkpoint: Path, p=part) -> list[Path]:
            path = manifest(checkpoint)
            flip_bit(path, path.stat().st_size * p // 100, p % 8)
            return [path]

        yield Damage(
            name=f"bit {part % 8}, {part} % into the manifest",
            do=flip_manifest,
            expected=MANIFEST,
            in_ci=part in (0, 54),
        )


def _cut() -> Iterator[Damage]:
    edges = [*REGIONS, "end"]
    for edge, more in itertools.product(edges, (-1, 0, 1)):
        if (edge == "end" and more >= 0) or (edge == REGIONS[0] and more < 0):
            continue  # that is no cut

        def cut(_: Path, checkpoint: Path, e=edge, m=more) -> list[Path]:
            path = shard(checkpoint, RANK)
            regions = regions_of(checkpoint, RANK)
            end = path.stat().st_size
            os.truncate(path, (end if e == "end" else regions[e][0]) + m)
            return [path]

        name = f"cut at the start of {edge}".replace("/", ".")
        if edge == "end":
            name = "cut at the end"
        yield Damage(
            name=f"{name}{more:+d}", do=cut, expected=INCOMPLETE, in_ci=more == 0
        )


def _grown() -> Iterator[Damage]:
    for file, find in (("shard", lambda c: shard(c, RANK)), ("layout", layout)):
        spares = _NEEDS_NO_LAYOUT if file == "layout" else ()
        for count in (1, 4096):

            def grow(_: Path, checkpoint: Path, f=find, n=count) -> list[Path]:
                with f(checkpoint).open("ab") as opened:
                    opened.write(b"\0" * n)
                return [f(checkpoint)]

            yield Damage(
                name=f"{count} bytes more in the {file}",
                do=grow,
                expected=INCOMPLETE,
                spares=spares,
                in_ci=count == 1,
            )

    def grow_manifest(_: Path, checkpoint: Path) -> list[Path]:
        with manifest(checkpoint).open("ab") as opened:
            opened.write(b"\n")
        return [manifest(checkpoint)]

    def cut_manifest(_: Path, checkpoint: Path) -> list[Path]:
        path = manifest(checkpoint)
        os.truncate(path, path.stat().st_size - 1)
        return [path]

    def cut_layout(_: Path, checkpoint: Path) -> list[Path]:
        path = layout(checkpoint)
        os.truncate(path, path.stat().st_size - 1)
        return [path]

    yield Damage(
        name="1 byte more in the manifest", do=grow_manifest, expected=MANIFEST
    )
    yield Damage(name="manifest cut short", do=cut_manifest, expected=MANIFEST)
    yield Damage(
        name="layout cut short",
        do=cut_layout,
        expected=INCOMPLETE,
        spares=_NEEDS_NO_LAYOUT,
    )


def _of_other_saves() -> Iterator[Damage]:
    for a, b in itertools.combinations(range(SIZE), 2):

        def swap(_: Path, checkpoint: Path, one=a, two=b) -> list[Path]:
            first, second = shard(checkpoint, one), shard(checkpoint, two)
            content = first.read_bytes()
            first.write_bytes(second.read_bytes())
            second.write_bytes(content)
            return [first, second]

        yield Damage(
            name=f"shards {a} and {b} swapped",
            do=swap,
            expected=EITHER,
            in_ci=(a, b) == (1, 2),
        )
    for a, b in itertools.permutations(range(SIZE), 2):

        def duplicate(_: Path, checkpoint: Path, one=a, two=b) -> list[Path]:
            shutil.copyfile(shard(checkpoint, one), shard(checkpoint, two))
            return [shard(checkpoint, two)]

        yield Damage(
            name=f"shard {a} twice, as {b} too",
            do=duplicate,
            expected=EITHER,
            in_ci=(a, b) == (2, 1),
        )
    sources = {
        "another state of the same step": "other state",
        "another step": f"run/step-{OLD:010d}",
        "another number of ranks": "three ranks",
    }
    for what, source in sources.items():

        def replace(library: Path, checkpoint: Path, s=source) -> list[Path]:
            path = shard(checkpoint, RANK)
            shutil.copyfile(shard(library / s, RANK), path)
            return [path]

        yield Damage(name=f"a shard of {what}", do=replace, expected=EITHER, in_ci=True)

    def replace_equal(library: Path, checkpoint: Path) -> list[Path]:
        shutil.copyfile(shard(library / "equal", RANK), shard(checkpoint, RANK))
        return []

    def replace_manifest(library: Path, checkpoint: Path) -> list[Path]:
        other = library / "other state"
        shutil.copyfile(manifest(other), manifest(checkpoint))
        return [checkpoint / record.path for record in read_manifest(other).shards]

    yield Damage(
        name="a shard of an equal save", do=replace_equal, expected=(), in_ci=True
    )
    yield Damage(
        name="the manifest of another save", do=replace_manifest, expected=INCOMPLETE
    )


def changed(change: Callable[[dict[str, Any]], Any]) -> Callable[..., list[Path]]:
    def do(_: Path, checkpoint: Path) -> list[Path]:
        forge_manifest(checkpoint, change)
        document = json.loads(manifest(checkpoint).read_bytes())
        blamed = [checkpoint / document["shards"][RANK]["path"]]
        blamed += [checkpoint / document["layout"]["path"]]
        return [*blamed, manifest(checkpoint)]

    return do


def _wrong_manifests() -> Iterator[Damage]:
    """Yield manifests that are signed, and wrong about a file."""

    for more in (-4096, -1, 1, 2**40):

        def shard_size(document: dict[str, Any], m=more) -> None:
            document["shards"][RANK]["nbytes"] += m

        def layout_size(document: dict[str, Any], m=more) -> None:
            document["layout"]["nbytes"] += m

        yield Damage(
            name=f"manifest wrong about a shard's size by {more:+d}",
            do=changed(shard_size),
            expected=INCOMPLETE,
            in_ci=more == 1,
        )
        yield Damage(
            name=f"manifest wrong about the layout's size by {more:+d}",
            do=changed(layout_size),
            # A size below the end of what lies in it is no manifest.
            expected=INCOMPLETE + MANIFEST,
            spares=_NEEDS_NO_LAYOUT,
        )


def _wrong_digests() -> Iterator[Damage]:
    for place, what in enumerate(("place", "length")):
        for more in (-1, 1):

            def index(document: dict[str, Any], p=place, m=more) -> None:
                document["shards"][RANK]["index"][p] += m

            yield Damage(
                name=f"manifest wrong about the {what} of an index by {more:+d}",
                do=changed(index),
                expected=CORRUPT,
            )
    for name, wrong in (("sha256", "0" * 64), ("crc32", "0" * 8)):

        def digest(document: dict[str, Any], n=name, w=wrong) -> None:
            document["shards"][RANK][n] = w

        # Each way to verify is complete with a digest of its own.
        only = {
            "sha256": ("load crc32", "reshard", "open", "verify --fast"),
            "crc32": ("load sha256",),
        }
        yield Damage(
            name=f"manifest wrong about the {name} of a shard",
            do=changed(digest),
            expected=CORRUPT,
            spares=only[name],
        )


def _power_losses() -> Iterator[Damage]:
    for region in REGIONS:
        if region == "padding 4":
            continue  # zeros already: nothing would change

        def punch(_: Path, checkpoint: Path, r=region) -> list[Path]:
            path = shard(checkpoint, RANK)
            low, high = regions_of(checkpoint, RANK)[r]
            content = bytearray(path.read_bytes())
            start = (low + high) // 2 // 4096 * 4096
            content[start : start + 4096] = bytes(len(content[start : start + 4096]))
            path.write_bytes(content)
            return [path]

        yield Damage(
            name=f"a hole of 4096 bytes in {region.replace('/', '.')}",
            do=punch,
            expected=CORRUPT,
            in_ci=region == "array model/w",
        )
    yield from _lost_files()


def _lost_files() -> Iterator[Damage]:
    for name, find, expected, spares in _FILES:

        def empty(_: Path, checkpoint: Path, f=find) -> list[Path]:
            path = f(checkpoint)
            os.truncate(path, 0)
            return [path]

        def zero(_: Path, checkpoint: Path, f=find) -> list[Path]:
            path = f(checkpoint)
            path.write_bytes(bytes(path.stat().st_size))
            return [path]

        def remove(_: Path, checkpoint: Path, f=find) -> list[Path]:
            path = f(checkpoint)
            path.unlink()
            return [path]

        is_manifest, is_unused = name == "manifest", name == "receipts"
        lost = MANIFEST if is_manifest else () if is_unused else INCOMPLETE
        gone = NOT_FOUND if is_manifest else lost
        in_ci = name in ("shard 2", "manifest")
        for how, do, says in (
            ("empty", empty, lost),
            ("all zeros", zero, expected),
            ("missing", remove, gone),
        ):
            yield Damage(
                name=f"{name} {how}",
                do=do,
                expected=says,
                spares=spares,
                in_ci=in_ci,
            )

    def remove_all_shards(_: Path, checkpoint: Path) -> list[Path]:
        paths = [shard(checkpoint, rank) for rank in range(SIZE)]
        for path in paths:
            path.unlink()
        return paths

    yield Damage(
        name="all shards missing", do=remove_all_shards, expected=INCOMPLETE, in_ci=True
    )


def _receipts(checkpoint: Path) -> Path:
    [path] = checkpoint.glob("receipts-*.json")
    return path


_FILES: list[tuple[str, Callable[[Path], Path], tuple[str, ...], tuple[str, ...]]] = [
    *((f"shard {r}", lambda c, r=r: shard(c, r), CORRUPT, ()) for r in range(SIZE)),
    ("layout", layout, CORRUPT, _NEEDS_NO_LAYOUT),
    ("manifest", manifest, MANIFEST, ()),
    ("receipts", _receipts, (), ()),
]


def _no_files() -> Iterator[Damage]:
    """Yield what else can stand where a file was."""
    kinds: dict[str, Callable[[Path, Path], None]] = {
        "a directory": lambda path, _: path.mkdir(),
        "a FIFO": lambda path, _: os.mkfifo(path),
        "a socket": lambda path, _: os.mknod(path, stat.S_IFSOCK | 0o600),
        "a symlink to the same": lambda path, moved: path.symlink_to(moved),
        "a symlink to nothing": lambda path, _: path.symlink_to("nothing"),
        "a symlink to itself": lambda path, _: path.symlink_to(path.name),
    }
    files = {"shard": lambda c: shard(c, RANK), "layout": layout, "manifest": manifest}
    for (name, find), (kind, make) in itertools.product(files.items(), kinds.items()):

        def replace(library: Path, checkpoint: Path, f=find, m=make) -> list[Path]:
            path = f(checkpoint)
            moved = shutil.move(path, checkpoint.parent / f"moved-{path.name}")
            m(path, moved)
            return [path]

        yield Damage(
            name=f"{kind} in place of the {name}",
            do=replace,
            expected=STORAGE,
            spares=_NEEDS_NO_LAYOUT if name == "layout" else (),
            in_ci=(name, kind) in {("shard", "a FIFO"), ("manifest", "a directory")},
        )
    for name, find in files.items():

        def hide(_: Path, checkpoint: Path, f=find) -> list[Path]:
            f(checkpoint).chmod(0)
            return [f(checkpoint)]

        yield Damage(
            name=f"{name} unreadable",
            do=hide,
            expected=STORAGE,
            spares=_NEEDS_NO_LAYOUT if name == "layout" else (),
            # An older checkpoint would not mend who may read what.
            falls_back=False,
            in_ci=name == "shard",
        )

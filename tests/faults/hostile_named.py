"""What an enemy may have written in a run: forgeries that have a name each."""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpickpt import read_manifest, step_path
from mpickpt.format.digest import crc32, crc32_hex
from tests.faults.hostile_mutations import nested
from tests.faults.hostile_readers import NEW, OLD, SIZE
from tests.unit.forging import forge_index, forge_layout, forge_manifest

Forge = Callable[[Path, Path, int], Any]

FEW = ("verify --fast", "load on 2", "open", "diff")


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgery:
    """One case: a family of forgeries, or a single one.

    Attributes
    ----------
    name : str
        Unique and the same at every run.
    forge : callable of (run, outside, turn)
        Forges a run in place.
    turns : int
        How many there are.
    keeps_bytes : bool
        Whether the shards' arrays are as they were: what is read then must be right.
    is_harmless : bool
        Whether every reader must accept it.
    always_writes : bool
        Whether what changes a run is tried at every turn.
    leads_out : bool
        Whether it may be read outside, because a user may link a checkpoint.
    readers : tuple of str
        Those that read it; by default all.
    """

    name: str
    forge: Forge
    turns: int = 1
    keeps_bytes: bool = False
    is_harmless: bool = False
    always_writes: bool = True
    leads_out: bool = False
    readers: tuple[str, ...] = ()
    in_ci: bool = True
    impossible: tuple[type[Exception], ...] = ()


def rng_of(*seed: Any) -> random.Random:
    return random.Random(repr(seed))


# Control files.

_LEASE = {
    "job": "slurm-1",
    "restart_count": 0,
    "host": "node",
    "machine": "elsewhere",
    "pid": 1,
    "started": 1,
    "beat_s": 2.0,
    "beat": "000000000001",
    "state": "held",
}
_STEP = step_path("", NEW).name
CONTROL: dict[str, Any] = {
    "lease/0000000001.json": _LEASE,
    "halt": {"reason": "because", "at": "2026-01-01T00:00:00Z"},
    f"pins/{_STEP}": {},
    f"metrics/{_STEP}.json": {"checkpoint_id": "", "metrics": {"loss": 0.5}},
    f"attempts/{_STEP}.json": {"attempts": 1},
    f"rejected/{_STEP}.rejected-0123abcd.json": {"number": 1, "reason": "x", "at": ""},
}


def write_control(run: Path) -> None:
    """Write every control file as the library would, and set a checkpoint aside."""
    aside = run / f"{_STEP}.rejected-0123abcd"
    shutil.copytree(step_path(run, OLD), aside)
    for name, document in CONTROL.items():
        path = run / ".mpickpt" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if "checkpoint_id" in document:
            own = read_manifest(step_path(run, NEW)).checkpoint_id
            document = document | {"checkpoint_id": own}
        path.write_text(json.dumps(document))


def _control(name: str, content: str) -> Forge:
    def forge(run: Path, _: Path, turn: int) -> None:
        write_control(run)
        path = run / ".mpickpt" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)

    return forge


def _control_link(name: str, *, to_file: bool) -> Forge:
    """Make a control file or directory a symlink that leads outside."""

    def forge(run: Path, outside: Path, turn: int) -> None:
        write_control(run)
        path = run / ".mpickpt" / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        path.symlink_to(outside / "secret" if to_file else outside)

    return forge


def _control_special(name: str, make: Callable[[Path], Any]) -> Forge:
    def forge(run: Path, _: Path, turn: int) -> None:
        write_control(run)
        path = run / ".mpickpt" / name
        path.unlink(missing_ok=True)
        make(path)

    return forge


# Files and directories.


def _link_file(find: Callable[[Path], str]) -> Forge:
    def forge(run: Path, outside: Path, turn: int) -> None:
        path = step_path(run, NEW)
        file = path / find(path)
        shutil.move(file, outside / file.name)
        file.symlink_to(outside / file.name)

    return forge


def _link_step(run: Path, outside: Path, turn: int) -> None:
    """Make the newest checkpoint a symlink to one that lies outside."""
    shutil.move(step_path(run, NEW), outside / "theirs")
    step_path(run, NEW).symlink_to(outside / "theirs")


def _link_unpublished(run: Path, outside: Path, turn: int) -> None:
    (run / "step-0000000003").symlink_to(outside)


def _link_shard_directory(run: Path, outside: Path, turn: int) -> None:
    """Let a sweep find a directory of shards that lies outside."""
    step = run / "step-0000000003"
    step.mkdir()
    (step / "ranks00000").symlink_to(outside)
    (step_path(run, NEW) / "ranks00000").symlink_to(outside)


def _link_rejected(run: Path, outside: Path, turn: int) -> None:
    for number in range(4):
        link = run / f"step-000000000{number}.rejected-0123abcd"
        link.symlink_to(outside)


def _strange_names(run: Path, outside: Path, turn: int) -> None:
    for name in (
        *("step-9999999999999999999", "step-00000000003", "step--000000001"),
        *("step-0000000004.rejected-zzzzzzzz", "step-٠٠٠٠٠٠٠٠٠١", "step-0000000005\n"),
    ):
        (run / name).mkdir()
    (run / "step-0000000006").write_text("a file")
    shutil.copytree(step_path(run, OLD), run / "step-9999999999999999998")


def normalize_layout(path: Path) -> None:
    """Write a forged layout file in the one form that is read, and sign it."""
    record = json.loads((path / "manifest.json").read_bytes())["layout"]
    file = path / record["path"]
    document = json.loads(file.read_bytes())
    lines = [
        json.dumps(line, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        for line in sorted(document["arrays"], key=lambda line: line["key"])
    ]
    text = '{"arrays":[\n' + ",\n".join(lines) + '\n],"schema_version":1}\n'
    content = text.encode("utf-8", "backslashreplace")
    file.write_bytes(content)
    record |= {
        "nbytes": len(content),
        "payload": [0, len(content), crc32_hex(crc32(content))],
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    forge_manifest(path, lambda manifest: manifest.update(layout=record))


def _layout_of_other_ranks(run: Path, _: Path, turn: int) -> None:
    """Let the layout file say that each part lies in the other rank's shard."""
    path = step_path(run, NEW)

    def change(document: Any) -> None:
        for array in document["arrays"]:
            for part in array.get("parts", ()):
                part[0] = 1 - part[0]

    forge_layout(path, change)
    normalize_layout(path)


# Documents of a size or a shape that could take long, or much memory.


def _many_arrays(run: Path, _: Path, turn: int) -> None:
    def change(manifest: Any) -> None:
        example = {"kind": "sharded", "dtype": "float32", "global_shape": [0, 2**20]}
        more = [example | {"key": f"more/{n}"} for n in range(100_000)]
        manifest["arrays"] += more

    forge_manifest(step_path(run, NEW), change)


def _in_index(change: Callable[[Any], Any]) -> Forge:
    return lambda run, _, turn: forge_index(step_path(run, NEW), 1, change)


def _in_manifest(change: Callable[[Any], Any]) -> Forge:
    return lambda run, _, turn: forge_manifest(step_path(run, NEW), change)


def _entry(index: Any, key: str) -> Any:
    return next(array for array in index["arrays"] if array["key"] == key)


def _many_index_arrays(index: Any) -> None:
    example = {"kind": "per_rank", "dtype": "int8", "shape": [0], "parts": []}
    index["arrays"] += [example | {"key": f"more/{n}"} for n in range(100_000)]


def _many_parts(index: Any) -> None:
    part = _entry(index, "own")["parts"][0]
    _entry(index, "own")["parts"] = [part] * 100_000


def _many_overlapping_parts(index: Any) -> None:
    place = _entry(index, "own")["parts"][0][0]
    parts = [[place, [n % 3], [1]] for n in range(50_000)]
    _entry(index, "own")["parts"] = parts


def _many_axes(index: Any) -> None:
    """Boxes that differ along every axis have 2^axes corners that do not cancel."""
    axes = 26
    own = _entry(index, "own")
    place = own["parts"][0][0]
    own["dtype"], own["shape"] = "int8", [2] * axes
    one = [place, [0] * axes, [1] * axes]
    other = [place, [1] * axes, [1] * axes]
    own["parts"] = [one, other]


def _many_axes_sharded(run: Path, _: Path, turn: int) -> None:
    path, axes = step_path(run, NEW), 40

    def in_manifest(manifest: Any) -> None:
        for record in manifest["arrays"]:
            if record["key"] == "w":
                record["global_shape"], record["dtype"] = [2] * axes, "int8"

    def in_index(rank: int) -> Callable[[Any], None]:
        def change(index: Any) -> None:
            w = _entry(index, "w")
            w["shape"], w["dtype"] = [2] * axes, "int8"
            w["parts"] = [[w["parts"][0][0], [rank] * axes, [1] * axes]]
            w["boxes"] = [[[rank] * axes, [1] * axes]]

        return change

    for rank in range(SIZE):
        forge_index(path, rank, in_index(rank))
    forge_manifest(path, in_manifest)


def _enormous_everywhere(run: Path, _: Path, turn: int) -> None:
    """Let manifest and indexes agree on an array that no file can hold."""
    path, shape = step_path(run, NEW), [2**38]

    def in_index(index: Any) -> None:
        w = _entry(index, "w")
        w["shape"] = shape
        w.pop("boxes", None)

    for rank in range(SIZE):
        forge_index(path, rank, in_index)
    forge_manifest(
        path,
        lambda manifest: (
            [
                record.update(global_shape=shape)
                for record in manifest["arrays"]
                if record["key"] == "w"
            ]
            and None
        ),
    )


def _long_index(index: Any) -> None:
    index["tree"]["x"] = ["y"] * 200_000


def _table_is_all(index: Any) -> None:
    index["table"] = [0, index["table"][0]]


def _int_of_5000_digits(run: Path, _: Path, turn: int) -> None:
    big = {"$int": hex(10**5000)}
    for step in (OLD, NEW):
        for rank in range(SIZE):
            forge_index(
                step_path(run, step),
                rank,
                lambda index, s=step: index["tree"].update(
                    x=big if s == NEW else {"$int": hex(10**5000 + 1)}
                ),
            )


def _tree(make: Callable[[], Any]) -> Forge:
    return _in_index(lambda index: index["tree"].update(x=make()))


def _metadata(make: Callable[[], Any]) -> Forge:
    return _in_manifest(lambda manifest: manifest["metadata"].update(x=make()))


def _layout_name(path: Path) -> str:
    record = read_manifest(path).layout
    assert record is not None
    return record.path


_FILES: dict[str, Callable[[Path], str]] = {
    "manifest": lambda path: "manifest.json",
    "shard": lambda path: read_manifest(path).shards[1].path,
    "layout": _layout_name,
}


def named() -> list[Forgery]:
    def one(name: str, forge: Forge, **options: Any) -> Forgery:
        return Forgery(name=name, forge=forge, **options)

    deep = rng_of("deep")
    return [
        *(
            one(f"link/{name} outside", _link_file(find), keeps_bytes=True)
            for name, find in _FILES.items()
        ),
        one("link/step outside", _link_step, is_harmless=True, leads_out=True),
        one(
            "link/unpublished step outside",
            _link_unpublished,
            is_harmless=True,
            leads_out=True,
        ),
        one("link/directory of shards outside", _link_shard_directory),
        one("link/rejected outside", _link_rejected, leads_out=True),
        *(
            one(f"link/control {name} outside", _control_link(name, to_file=False))
            for name in ("lease", "pins", "metrics", "attempts", "rejected", "")
        ),
        *(
            one(f"link/control file {name} outside", _control_link(name, to_file=True))
            for name in CONTROL
        ),
        *(
            one(f"control/{kind} as {name}", _control_special(name, make))
            for name in CONTROL
            for kind, make in {"FIFO": os.mkfifo, "directory": Path.mkdir}.items()
        ),
        one(
            "control/last lease of ten digits",
            _control("lease/9999999999.json", json.dumps(_LEASE | {"state": "free"})),
        ),
        one(
            "control/lease of an enormous process",
            _control("lease/0000000001.json", json.dumps(_LEASE | {"pid": 10**4000})),
        ),
        one(
            "control/attempts of 4300 digits",
            _control(f"attempts/{_STEP}.json", '{"attempts": ' + "9" * 4300 + "}"),
        ),
        one(
            "control/number of 4300 digits",
            _control(
                f"rejected/{_STEP}.rejected-0123abcd.json",
                '{"number": ' + "9" * 4300 + "}",
            ),
        ),
        one(
            "control/metric NaN",
            _control(f"metrics/{_STEP}.json", '{"metrics": {"loss": NaN}}'),
        ),
        one("names/strange directories", _strange_names),
        one(
            "size/100,000 arrays in the manifest",
            _many_arrays,
            readers=("read_manifest", "verify --fast", "load on 2", "show --json"),
            in_ci=False,
        ),
        one(
            "size/100,000 arrays in an index",
            _in_index(_many_index_arrays),
            readers=FEW,
        ),
        one("size/100,000 equal parts", _in_index(_many_parts)),
        one("size/50,000 overlapping parts", _in_index(_many_overlapping_parts)),
        one("size/boxes apart along 26 axes", _in_index(_many_axes)),
        one("size/boxes apart along 40 axes", _many_axes_sharded),
        one("size/200,000 leaves", _in_index(_long_index), readers=FEW, in_ci=False),
        one(
            "size/array of 2^60 elements",
            _in_manifest(
                lambda m: m["arrays"][-1].update(
                    kind="sharded", dtype="float64", global_shape=[2**60]
                )
            ),
            keeps_bytes=True,
        ),
        one("size/array of 2^60 elements in every file", _enormous_everywhere),
        one("lie/layout of other ranks", _layout_of_other_ranks, keeps_bytes=True),
        one("lie/table is the whole file", _in_index(_table_is_all)),
        one("tree/integer of 5,000 digits", _int_of_5000_digits),
        one(
            "tree/key of 5,000 digits",
            _tree(lambda: {"$dict": [[{"$int": hex(10**5000)}, 1]]}),
        ),
        one("tree/nested 99 deep", _tree(lambda: nested(99, deep))),
        one("tree/key nested 300 deep", _tree(lambda: _nested_keys(300))),
        *(
            one(
                f"manifest/metadata nested {depth} deep",
                _metadata(lambda d=depth: json.loads("[" * d + "]" * d)),
                keeps_bytes=True,
            )
            for depth in (100, 500, 800, 900, 940, 960)
        ),
        one(
            "manifest/run time of 10^400 seconds",
            _in_manifest(lambda m: m.update(wall_clock_seconds=10**400)),
        ),
        one(
            "manifest/control characters in names",
            _in_manifest(
                lambda m: m.update(
                    metrics={"\x1b[2J\n": "\x1b]0;x\x07"},
                    metadata={"\udc1b\ud800": "\u202e"},
                    writer={"\x9b": "\r"},
                )
            ),
            keeps_bytes=True,
        ),
        one(
            "manifest/metrics of every type",
            _in_manifest(
                lambda m: m.update(
                    metrics={"loss": [1], "a": {}, "b": None, "": 10**300}
                )
            ),
            keeps_bytes=True,
        ),
    ]


def _nested_keys(depth: int) -> Any:
    document: Any = 1
    for _ in range(depth):
        document = {"$dict": [[document, 1]]}
    return document

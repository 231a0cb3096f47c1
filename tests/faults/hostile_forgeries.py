"""What an enemy may have written in a run: forgeries by name, and from seeds."""

import functools
import hashlib
import json
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mpickpt import read_manifest, step_path
from tests.crash.small_state import regions_of
from tests.faults.hostile_mutations import (
    as_text,
    duplicated_key,
    garbage,
    mutated,
    nested,
)
from tests.faults.hostile_named import (
    CONTROL,
    Forgery,
    named,
    normalize_layout,
    rng_of,
    write_control,
)
from tests.faults.hostile_readers import NEW, SIZE
from tests.unit.forging import (
    forge_index,
    forge_layout,
    forge_manifest,
    signed,
)

# What `forging` cannot write: that mutation is left out.
IMPOSSIBLE = (KeyError, TypeError, ValueError, RecursionError, IndexError)
TURNS = 12
SEEDS = 10
SEEDS_IN_CI = 1


def _fuzz_manifest(run: Path, _: Path, turn: int, *, seed: int) -> None:
    rng, path = rng_of("manifest", seed, turn), step_path(run, NEW)
    kind = rng.randrange(10)
    if kind < 8:
        forge_manifest(path, lambda document: mutated(document, rng))
        return
    file = path / "manifest.json"
    document = json.loads(file.read_bytes())
    if kind == 8:
        text = json.dumps(document | {"manifest_sha256": "0" * 64})
        file.write_bytes(signed(duplicated_key(text, rng)))
    else:
        forge_garbled_manifest(file, rng)


def forge_garbled_manifest(file: Path, rng: random.Random) -> None:
    """Garble a manifest, and sign what can still be signed."""
    text = file.read_bytes()
    digest = json.loads(text)["manifest_sha256"].encode()
    garbled = garbage(text, rng)
    blank = garbled.replace(digest, b"0" * 64)
    now = hashlib.sha256(blank).hexdigest().encode()
    file.write_bytes(garbled.replace(digest, now))


def _fuzz_index(run: Path, _: Path, turn: int, *, seed: int) -> None:
    rng, path = rng_of("index", seed, turn), step_path(run, NEW)
    rank = rng.randrange(SIZE)
    if rng.randrange(5) == 0:
        raw = rng.randrange(1 << 30)
        forge_index(
            path,
            rank,
            lambda document: garbage(as_text(document).encode(), rng_of(raw)),
            raw=True,
        )
        return
    drawn: list[Any] = []

    def change(document: Any) -> Any:
        # Called again for the place of the table: with the same changes.
        if not drawn:
            drawn.append(mutated(document, rng))
        return drawn[0]

    forge_index(path, rank, change)


def _fuzz_layout(run: Path, _: Path, turn: int, *, seed: int) -> None:
    rng, path = rng_of("layout", seed, turn), step_path(run, NEW)

    def change(document: Any) -> Any:
        document = mutated(document, rng)
        return document

    forge_layout(path, change)
    if rng.randrange(3):  # in the one form that is read
        normalize_layout(path)


def _fuzz_hdf5(run: Path, _: Path, turn: int, *, seed: int) -> None:
    """Change what HDF5 alone reads; sign it, so that no digest tells."""
    rng, path = rng_of("hdf5", seed, turn), step_path(run, NEW)
    rank = rng.randrange(SIZE)
    spans = [s for n, s in regions_of(path, rank).items() if n.startswith("metadata")]
    file = path / read_manifest(path).shards[rank].path
    content = bytearray(file.read_bytes())
    for _ in range(rng.choice((1, 4, 64))):
        low, high = rng.choice(spans)
        start = rng.randrange(low, high)
        stop = min(start + rng.choice((1, 2, 8)), high)
        content[start:stop] = rng.randbytes(stop - start)
    file.write_bytes(content)
    forge_index(path, rank, lambda document: None)


def _fuzz_control(run: Path, outside: Path, turn: int, *, seed: int) -> None:
    rng = rng_of("control", seed, turn)
    write_control(run)
    for name in rng.sample(sorted(CONTROL), rng.choice((1, 2))):
        path = run / ".mpickpt" / name
        content = path.read_bytes()
        kind = rng.randrange(8)
        if kind < 5:
            path.write_text(as_text(mutated(json.loads(content), rng)))
        elif kind == 5:
            path.write_bytes(garbage(content, rng))
        elif kind == 6:
            path.write_bytes(as_text(nested(rng.choice((90, 900, 5000)), rng)).encode())
        else:
            path.unlink()
            make = rng.choice((Path.mkdir, os.mkfifo, str))  # or leave it away
            make(path)
    [receipts] = step_path(run, NEW).glob("receipts-*.json")
    receipts.write_bytes(garbage(receipts.read_bytes(), rng))


def _fuzzed() -> Sequence[Forgery]:
    families: dict[str, tuple[Callable[..., None], bool, bool]] = {
        "manifest": (_fuzz_manifest, True, False),
        "index": (_fuzz_index, False, False),
        "layout": (_fuzz_layout, True, False),
        "hdf5": (_fuzz_hdf5, True, True),
        "control": (_fuzz_control, True, False),
    }
    return [
        Forgery(
            name=f"fuzz/{family}/seed {seed}",
            forge=functools.partial(forge, seed=seed),
            turns=TURNS,
            keeps_bytes=keeps_bytes,
            is_harmless=is_harmless,
            always_writes=family == "control",
            in_ci=seed < SEEDS_IN_CI,
            impossible=IMPOSSIBLE,
        )
        for family, (forge, keeps_bytes, is_harmless) in families.items()
        for seed in range(SEEDS)
    ]


CASES = [*named(), *_fuzzed()]

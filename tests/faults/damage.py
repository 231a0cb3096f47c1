"""Damages at rest every part of a checkpoint; every reader must see it, or need not.

One mpiexec of four ranks goes through all damages (programs/damage_reads.py). Every
bit of the manifest is flipped here, where parsing one takes a fraction of a ms.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from mpickpt import CheckpointError, ManifestError, step_path
from mpickpt.format.manifest import parse_manifest
from tests.crash.small_state import regions_of
from tests.faults.damage_cases import (
    NEW,
    RANK,
    REGIONS,
    SIZE,
    damages,
    save_library,
    shard,
)
from tests.faults.matrix import Case, Verdict
from tests.mpi_launch import REPOSITORY, finish, start

PROGRAM = str(REPOSITORY / "tests/faults/programs/damage_reads.py")
TIMEOUT_S = 900
READERS = (
    "load sha256",
    "load crc32",
    "reshard",
    "open",
    "verify",
    "verify --fast",
    "restore_latest",
)
_TILES = "regions tile the shard"
_MANIFEST_BITS = "every bit of the manifest"
_MANIFEST_CUTS = "every shorter and longer manifest"
_PARTS = 16


class DamageSuite:
    """Damage at rest, found at load time."""

    name = "damage"

    def why_not(self) -> str | None:
        """Return None: it needs nothing but an MPI."""
        return None

    def cases(self) -> Sequence[Case]:
        """Return each reader of each damage."""
        return [
            Case(name=_TILES, in_ci=True),
            *(Case(name=f"{_MANIFEST_BITS}/{p}", in_ci=True) for p in range(_PARTS)),
            Case(name=_MANIFEST_CUTS, in_ci=True),
            *(
                Case(name=f"{damage.name}/{reader}", in_ci=damage.in_ci)
                for damage in damages()
                for reader in READERS
            ),
        ]

    def run(
        self, cases: Sequence[Case], folder: Path
    ) -> Iterator[tuple[Case, Verdict]]:
        """Run cases, those with ranks last."""
        library = folder / "library"
        save_library(library)
        checkpoint = step_path(library / "run", NEW)
        with_ranks = []
        for case in cases:
            head, _, tail = case.name.partition("/")
            if head == _TILES:
                yield case, _tiles(checkpoint)
            elif head == _MANIFEST_BITS:
                yield case, _flip_manifest(checkpoint, int(tail))
            elif head == _MANIFEST_CUTS:
                yield case, _cut_manifest(checkpoint)
            else:
                with_ranks.append(case)
        if with_ranks:
            yield from _on_ranks(with_ranks, library, folder)


SUITE = DamageSuite()


def _on_ranks(
    cases: Sequence[Case], library: Path, folder: Path
) -> Iterator[tuple[Case, Verdict]]:
    """Run cases in one program; start anew behind a case that it died of."""
    left = list(cases)
    while left:
        told, ended = _told(left, library, folder)
        for case in left:
            if case.name in told:
                yield case, Verdict(**told[case.name])
        left = [case for case in left if case.name not in told]
        if left:
            yield left.pop(0), Verdict(hung=f"no word; {ended}")


def _told(
    cases: Sequence[Case], library: Path, folder: Path
) -> tuple[dict[str, dict[str, str]], str]:
    """Return what the program told of each case, and how it ended."""
    wanted = defaultdict(list)
    for case in cases:
        damage, _, reader = case.name.rpartition("/")
        wanted[damage].append(reader)
    chosen, results = folder / "chosen.json", folder / "results.jsonl"
    chosen.write_text(json.dumps(wanted))
    results.unlink(missing_ok=True)
    arguments = [PROGRAM, str(library), str(folder / "work"), results, chosen]
    outcome = finish(start([str(a) for a in arguments], size=SIZE), TIMEOUT_S)
    lines = results.read_text().splitlines() if results.exists() else []
    ended = "not in time" if outcome.timed_out else f"ended by {outcome.returncode}"
    return dict(map(json.loads, lines)), f"{ended}: {outcome.output[-1500:]}"


def _tiles(checkpoint: Path) -> Verdict:
    """Make sure that what is damaged below is all that a shard consists of."""
    regions = regions_of(checkpoint, RANK)
    nbytes = shard(checkpoint, RANK).stat().st_size
    starts = [start for start, _ in regions.values()]
    stops = [stop for _, stop in regions.values()]
    if (tuple(regions), starts, stops[-1]) != (REGIONS, [0, *stops[:-1]], nbytes):
        return Verdict(silent=f"other regions than {REGIONS}: {regions}")
    return Verdict()


def _flip_manifest(checkpoint: Path, part: int) -> Verdict:
    text = (checkpoint / "manifest.json").read_bytes()
    damaged = bytearray(text)
    accepted, foreign = [], []
    for offset in range(part, len(text), _PARTS):
        for bit in range(8):
            damaged[offset] ^= 1 << bit
            outcome = _parsed(bytes(damaged))
            damaged[offset] ^= 1 << bit
            if outcome is None:
                accepted.append((offset, bit))
            elif not isinstance(outcome, ManifestError):
                foreign.append((offset, bit, repr(outcome)))
    return _verdict_of(accepted, foreign)


def _cut_manifest(checkpoint: Path) -> Verdict:
    text = (checkpoint / "manifest.json").read_bytes()
    others = [text[:length] for length in range(len(text))]
    others += [text + more for more in (b"\n", b" ", b"{}", b"\0", text)]
    outcomes = [(len(other), _parsed(other)) for other in others]
    accepted = [length for length, outcome in outcomes if outcome is None]
    foreign = [
        (length, repr(outcome))
        for length, outcome in outcomes
        if outcome is not None and not isinstance(outcome, ManifestError)
    ]
    return _verdict_of(accepted, foreign)


def _parsed(text: bytes) -> Exception | None:
    try:
        parse_manifest(text, where="the manifest")
    except CheckpointError as error:
        return error if "the manifest" in str(error) else ValueError(str(error))
    except Exception as error:
        return error
    return None


def _verdict_of(accepted: list, foreign: list) -> Verdict:
    return Verdict(
        silent=f"accepted: {accepted[:20]}" if accepted else "",
        wrong_error=f"{foreign[:5]}" if foreign else "",
    )

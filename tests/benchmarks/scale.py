"""Measures planning and bookkeeping for tens of thousands of ranks, in one process.

Run as ``python -m tests.benchmarks.scale [--quick] [--json]``. Seconds are of this
process alone (user and system), so that a busy machine changes little. A row "of one
rank" is what one of the ranks has to compute, the others are all ranks' work together.
Exponents are a least-squares fit of log(seconds) over log(ranks), log(arrays) and
log(bytes) of the sizes that were measured.
"""

import argparse
import gc
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from mpickpt.format.hyperslab import whole
from mpickpt.format.manifest import dump_manifest, parse_manifest
from mpickpt.parallel.receipts import Receipt, Receipts, dump_receipt, shard_records
from mpickpt.planning.layout import owner_of
from mpickpt.planning.layout_rounds import (
    answers_to_holders,
    descriptions,
    resolved_keys,
)
from mpickpt.planning.layout_wire import unpack_answers
from mpickpt.planning.load_plan import assign_shards
from mpickpt.planning.matching import answered
from mpickpt.planning.matching_wire import announcements, answer_of
from mpickpt.planning.tiling import first_wrong_index
from tests.benchmarks.simulation import (
    CHECKPOINT_ID,
    announced,
    delivered,
    grid_box,
    held_by,
    key_of_array,
    manifest_of,
    matched,
    row_box,
    shape_of,
    stored_by_reader,
    wanted_by_rank,
)

ROWS_OF_RANK = 16
# A rank plans all of its arrays in one call.
ARRAYS_AT_A_TIME = 100


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement.

    `nbytes` is what is written or sent, `elements` what the arrays hold, in rows.
    """

    what: str
    ranks: int
    arrays: int
    seconds: float
    nbytes: int = 0
    elements: int = 0
    target_s: float | None = None
    target_nbytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Exponents of a cost: seconds ~ ranks^a arrays^b bytes^c; None if not varied."""

    what: str
    ranks: float | None
    arrays: float | None
    nbytes: float | None


def main() -> None:
    """Measure everything and print one table."""
    options = parse_options()
    rows, fits = measure(quick=options.quick)
    if options.json:
        document = {"rows": [*map(asdict, rows)], "exponents": [*map(asdict, fits)]}
        print(json.dumps(document, indent=2))
    else:
        print(table(rows, fits))


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="an eighth of the sizes")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def measure(*, quick: bool) -> tuple[list[Row], list[Fit]]:
    """Return all measurements and the exponents that they give."""
    part = 8 if quick else 1
    many = [size // part for size in (8192, 16384, 32768, 65536)]
    rows: list[Row] = []
    for ranks in many:
        rows += manifest_rows(ranks)
        rows += record_rows(ranks)
        rows += tiling_rows(ranks)
        rows += layout_rows(ranks, 1, ROWS_OF_RANK)
        rows.append(assignment_row(ranks))
    for ranks, arrays, rows_of_rank in layout_sizes(part):
        rows += layout_rows(ranks, arrays, rows_of_rank)
    for saved, size, arrays, rows_of_rank in reshard_sizes(part):
        rows += reshard_rows(saved, size, arrays, rows_of_rank)
    rows += per_rank_rows(4096 // part, 3072 // part, 1000)
    names = dict.fromkeys(row.what for row in rows)
    fits = [fit([row for row in rows if row.what == name]) for name in names]
    return rows, [one for one in fits if one is not None]


def layout_sizes(part: int) -> list[tuple[int, int, int]]:
    """Return (ranks, arrays, rows of a rank): each of them varied by itself."""
    ranks = 4096 // part
    by_ranks = [(ranks // n, 16, ROWS_OF_RANK) for n in (8, 4, 2)]
    by_arrays = [(ranks // 4, arrays, ROWS_OF_RANK) for arrays in (32, 64)]
    return [*by_ranks, *by_arrays, (ranks // 4, 16, 1024 * ROWS_OF_RANK)]


def reshard_sizes(part: int) -> list[tuple[int, int, int, int]]:
    """Return (saved ranks, ranks, arrays, rows of a rank)."""
    saved = 4096 // part
    by_ranks = [(n, 3 * n // 4, 10, ROWS_OF_RANK) for n in (saved // 4, saved // 2)]
    by_arrays = [(saved, 3 * saved // 4, n, ROWS_OF_RANK) for n in (10, 1000)]
    by_bytes = [(saved, 3 * saved // 4, 10, 1024 * ROWS_OF_RANK)]
    return [*by_ranks, *by_bytes, *by_arrays]


def manifest_rows(ranks: int) -> list[Row]:
    """Write and parse the manifest."""
    manifest = manifest_of(ranks, 1000)
    text, wrote_s = timed(lambda: dump_manifest(manifest))
    parsed, parsed_s = timed(lambda: parse_manifest(text, where="manifest.json"))
    assert parsed.world_size == ranks
    return [
        Row(
            what="write the manifest",
            ranks=ranks,
            arrays=1000,
            seconds=wrote_s,
            nbytes=len(text),
            target_s=1.0,
            target_nbytes=20_000_000,
        ),
        Row(
            what="parse the manifest",
            ranks=ranks,
            arrays=1000,
            seconds=parsed_s,
            nbytes=len(text),
            target_s=1.0,
        ),
    ]


def record_rows(ranks: int) -> list[Row]:
    """Read the receipts of all ranks, as each rank does and as rank 0 does."""
    receipt = Receipt(
        rank=0,
        nbytes=1 << 34,
        sha256="ab" * 32,
        crc32="0a1b2c3d",
        index=(1, 2, "0a1b2c3d"),
        numel=1,
        stage_s=0.5,
        write_s=4.0,
    )
    records = [dump_receipt(receipt)] * ranks
    _, every_s = timed(lambda: Receipts(records).nbytes)
    _, root_s = timed(
        lambda: list(shard_records(list(Receipts(records)), CHECKPOINT_ID))
    )
    nbytes = sum(map(len, records))
    common = {"ranks": ranks, "arrays": 0, "nbytes": nbytes}
    return [
        Row(what="receipts, of one rank", seconds=every_s, target_s=0.1, **common),
        Row(what="receipts to records, on rank 0", seconds=root_s, **common),
    ]


def tiling_rows(ranks: int) -> list[Row]:
    """Check that boxes cover an array: rows, and a grid of rows and columns."""
    shape = shape_of(0, ranks * ROWS_OF_RANK)
    rows = []
    for name, box_of in (("rows", row_box), ("a grid", grid_box)):
        boxes = [box_of(shape, rank, ranks) for rank in range(ranks)]
        wrong, seconds = timed(
            lambda boxes=boxes: first_wrong_index(whole(shape), boxes)
        )
        assert wrong is None
        what = f"coverage check, {name}"
        rows.append(
            Row(what=what, ranks=ranks, arrays=1, seconds=seconds, target_s=1.0)
        )
    return rows


def assignment_row(ranks: int) -> Row:
    """Share out the shards among three quarters of the ranks."""
    nbytes = [1 << 30 | rank for rank in range(ranks)]
    _, seconds = timed(lambda: assign_shards(nbytes, 3 * ranks // 4))
    return Row(
        what="who reads which shard, of one rank",
        ranks=ranks,
        arrays=0,
        seconds=seconds,
        target_s=0.1,
    )


def layout_rows(ranks: int, arrays: int, rows_of_rank: int) -> list[Row]:
    """Exchange descriptions of the arrays and answers, one array after the other."""
    seconds, nbytes = 0.0, 0
    for array in range(arrays):
        held = [held_by(rank, ranks, [array], rows_of_rank) for rank in range(ranks)]

        def exchanged(held=held) -> int:  # type: ignore[no-untyped-def]
            arrived = delivered({r: descriptions(h, ranks) for r, h in enumerate(held)})
            ((_, mail),) = arrived.items()
            answers = answers_to_holders(resolved_keys(mail))
            assert all(len(unpack_answers(packed)) == 1 for packed in answers.values())
            return sum(map(len, mail.values())) + sum(map(len, answers.values()))

        carried, took_s = timed(exchanged)
        seconds += took_s
        nbytes += carried
    return [
        Row(
            what="layout exchange, all ranks",
            ranks=ranks,
            arrays=arrays,
            seconds=seconds,
            nbytes=nbytes,
            elements=arrays * ranks * rows_of_rank,
        )
    ]


def reshard_rows(saved: int, size: int, arrays: int, rows_of_rank: int) -> list[Row]:
    """Plan a load on other ranks, as many arrays at a time as memory holds."""
    announce_s = match_s = take_s = 0.0
    rows = saved * rows_of_rank
    for first in range(0, arrays, ARRAYS_AT_A_TIME):
        some = range(first, min(first + ARRAYS_AT_A_TIME, arrays))
        stored = stored_by_reader(saved, size, some, rows)
        wanted = wanted_by_rank(size, some, rows)
        arrived, a_s = timed(lambda s=stored, w=wanted: announced(s, w))
        answers, m_s = timed(lambda mail=arrived: matched(mail, size))
        _, t_s = timed(
            lambda mail=answers: [answer_of(m.values()) for m in mail.values()]
        )
        announce_s, match_s, take_s = announce_s + a_s, match_s + m_s, take_s + t_s
    common = {"ranks": saved, "arrays": arrays, "elements": rows * arrays}
    target_s = 10.0 if arrays == 1000 else None
    return [
        Row(what="reshard: pack and route", seconds=announce_s, **common),
        Row(
            what="reshard: check coverage and plan",
            seconds=match_s,
            target_s=target_s,
            **common,
        ),
        Row(what="reshard: unpack", seconds=take_s, **common),
    ]


def per_rank_rows(saved: int, size: int, arrays: int) -> list[Row]:
    """Plan the part of the rank that owns most keys: nobody needs the whole plan."""
    rows = saved * ROWS_OF_RANK
    owners = [owner_of(key_of_array(array), size) for array in range(arrays)]
    busiest = max(owners, key=owners.count)
    own = [array for array, owner in enumerate(owners) if owner == busiest]
    mail = announced(
        stored_by_reader(saved, size, own, rows), wanted_by_rank(size, own, rows)
    )[busiest]
    boxes = stored_by_reader(saved, size, range(8), rows)[0]
    one = boxes[0]
    mine = [
        type(one)(
            key_of_array(array), array, None, one.global_shape, one.offset, one.shape
        )
        for array in range(arrays)
    ]
    wants = wanted_by_rank(1, range(arrays), rows)[0]
    _, announce_s = timed(lambda: announcements(mine, wants, size))
    answers, match_s = timed(lambda: answered(mail, size))
    sent = [answers[0]] * (arrays // len(own))
    _, take_s = timed(lambda: answer_of(sent).sendings())
    return [
        Row(
            what=f"reshard, of one rank that owns {len(own)} keys",
            ranks=saved,
            arrays=arrays,
            seconds=announce_s + match_s + take_s,
            target_s=0.1,
        )
    ]


def timed(call: Callable[[], object]) -> tuple[object, float]:
    """Return what the call returns, and the processor time that it takes."""
    gc.collect()
    gc.freeze()
    begin = time.process_time()
    result = call()
    seconds = time.process_time() - begin
    gc.unfreeze()
    return result, seconds


def fit(rows: Sequence[Row]) -> Fit | None:
    """Return the exponents of what was measured at several sizes."""
    sizes = {
        "ranks": [row.ranks for row in rows],
        "arrays": [row.arrays for row in rows],
        "nbytes": [_bytes_beyond(row) for row in rows],
    }
    varied = {name: of for name, of in sizes.items() if len(set(of)) > 1}
    if not varied:
        return None
    exponents = log_log_fit([*zip(*varied.values(), strict=True)], seconds_of(rows))
    found = dict(zip(varied, exponents, strict=True))
    return Fit(what=rows[0].what, **{name: found.get(name) for name in sizes})


def seconds_of(rows: Sequence[Row]) -> list[float]:
    return [row.seconds for row in rows]


def _bytes_beyond(row: Row) -> float:
    """Return the size of the arrays where it was varied apart from their number."""
    return row.elements / (row.ranks * row.arrays) if row.elements else 1.0


def log_log_fit(
    sizes: Sequence[Sequence[float]], costs: Sequence[float]
) -> list[float]:
    """Return the exponents a_i of cost ~ c * size_1^a_1 * size_2^a_2 ...

    Parameters
    ----------
    sizes : sequence of sequences of float
        For each measurement, its sizes.
    costs : sequence of float
        Seconds, bytes, or a number of operations.
    """
    logs = np.log(np.array(sizes, dtype=float))
    matrix = np.column_stack([logs, np.ones(len(logs))])
    found, *_ = np.linalg.lstsq(
        matrix, np.log(np.array(costs, dtype=float)), rcond=None
    )
    return [round(float(one), 3) for one in found[:-1]]


def table(rows: Sequence[Row], fits: Sequence[Fit]) -> str:
    """Return the measurements as text: the largest sizes of each, and the exponents."""
    heads = f"{'what':44}{'ranks':>7}{'arrays':>8}{'MB':>8}{'seconds':>10}{'target':>9}"
    lines = [heads]
    for row in rows:
        size = f"{row.nbytes / 1e6:.1f}" if row.nbytes else ""
        target = "" if row.target_s is None else f"{row.target_s:g} s"
        met = row.seconds < (row.target_s or math.inf)
        met &= row.nbytes < (row.target_nbytes or math.inf)
        mark = "" if met else "  MISSED"
        lines.append(
            f"{row.what:44}{row.ranks:>7}{row.arrays:>8}{size:>8}"
            f"{row.seconds:>10.4f}{target:>9}{mark}"
        )
    lines += [
        "",
        f"{'exponents: seconds ~ ranks^a arrays^b bytes^c':52}{'a':>8}{'b':>8}{'c':>8}",
    ]
    for one in fits:
        cells = (one.ranks, one.arrays, one.nbytes)
        lines.append(f"{one.what:52}" + "".join(map(_cell, cells)))
    return "\n".join(lines)


def _cell(exponent: float | None) -> str:
    return f"{'':>8}" if exponent is None else f"{exponent:>8.2f}"


if __name__ == "__main__":
    main()

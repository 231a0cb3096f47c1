"""A durable save, against the raw disk and the ceiling of the processor."""

from mpickpt.bench.bench import Bench
from mpickpt.bench.ceiling import CEILING, copy_and_digest
from mpickpt.bench.raw import raw_writes
from mpickpt.bench.rounds import Timings
from mpickpt.bench.rows import Row, Target, at_least

OURS = "save"


def measure_save(bench: Bench) -> list[Row]:
    """Measure a save against min(raw, ceiling)."""
    timings = time_writes(bench)
    raw = timings.fastest("raw write")
    bound = timings.slowest(raw, CEILING)
    return [
        rate_row(bench, "save", "raw write, fastest way", raw, timings),
        rate_row(bench, "save", f"ceiling: {CEILING}, no I/O", CEILING, timings),
        ratio_row(bench, OURS, bound, timings, at_least(0.95)),
    ]


def time_writes(bench: Bench) -> Timings:
    """Time raw writes, the ceiling and the library's save in one run."""
    return bench.take_turns(
        raw_writes(bench)
        | {CEILING: lambda: copy_and_digest(bench.arrays.values()), OURS: bench.save}
    )


def rate_row(
    bench: Bench, group: str, subject: str, name: str, timings: Timings
) -> Row:
    """Return the row of a bound: how fast it is."""
    return Row(
        group=group,
        subject=subject,
        value=bench.total_nbytes / timings.median(name) / 1e9,
        unit="GB/s",
        how=f"{name}, {bench.words}",
        # Once, in the first row of a group: the other rows come from the same run.
        seconds=timings.seconds if name != CEILING else {},
    )


def ratio_row(
    bench: Bench, ours: str, bound: str, timings: Timings, target: Target
) -> Row:
    """Return the row of our speed as a share of a bound's."""
    nbytes = bench.total_nbytes
    of_whom = "ceiling" if bound == CEILING else "raw"
    return Row(
        group=OURS,
        subject=f"durable save, SHA-256, of {of_whom}",
        value=timings.ratio(bound, ours),
        target=target,
        how=f"{timings.rate_text(ours, nbytes)}, {timings.rate_text(bound, nbytes)}",
        seconds={name: timings.seconds[name] for name in (ours, bound)},
    )

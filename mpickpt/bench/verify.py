"""`mpickpt verify` of files that lie in memory: the fast check against SHA-256."""

from mpickpt.bench.bench import Bench
from mpickpt.bench.rounds import take_turns
from mpickpt.bench.rows import Row, at_least
from mpickpt.storage.verification import verify_checkpoint

FAST, FULL = "verify --fast", "verify"


def measure_verify(bench: Bench) -> list[Row]:
    """Measure how much faster CRC-32 alone is; one process verifies, others wait."""
    bench.save()

    def verify(*, fast: bool) -> None:
        if bench.ranks.rank == 0:
            report = verify_checkpoint(bench.checkpoint, fast=fast)
            if not report.is_whole:
                raise AssertionError(f"the checkpoint is damaged: {report.failures}")

    timings = take_turns(
        bench.ranks,
        {FAST: lambda: verify(fast=True), FULL: lambda: verify(fast=False)},
        repeat=bench.repeat,
        before=bench.ranks.barrier,
    )
    rates = (timings.rate_text(name, bench.total_nbytes) for name in (FAST, FULL))
    return [
        Row(
            group="verify",
            subject="CRC-32 fast check, times as fast as SHA-256, warm",
            value=timings.ratio(FULL, FAST),
            target=at_least(4),
            how=", ".join(rates),
            seconds=timings.seconds,
        )
    ]

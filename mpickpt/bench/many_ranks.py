"""Many ranks on few cores: saves and loads against as many raw writers and readers."""

from mpickpt.bench.bench import Bench
from mpickpt.bench.load import SHA256, time_reads
from mpickpt.bench.rounds import Timings
from mpickpt.bench.rows import Row, at_least, not_run
from mpickpt.bench.save import OURS, time_writes

GROUP = "many-ranks"
_NBYTES = 8 << 20
_FEWEST = 16
_TARGET = at_least(0.7)
_COMMAND = f"mpiexec -n 64 mpickpt bench --nbytes 8MiB --only {GROUP}"


def measure_many_ranks(bench: Bench) -> list[Row]:
    """Measure 8 MiB a rank."""
    if bench.ranks.size < _FEWEST:
        why = f"needs {_FEWEST} ranks or more: {_COMMAND}"
        return [not_run(GROUP, "save and load by many ranks", why, _TARGET)]
    small = bench.smaller(_NBYTES)
    saves = time_writes(small)
    loads, share = time_reads(small)
    return [
        _row(small, OURS, saves.fastest("raw write"), saves, "synced"),
        _row(small, SHA256, loads.fastest("raw read"), loads, share),
    ]


def _row(bench: Bench, ours: str, raw: str, timings: Timings, how: str) -> Row:
    nbytes = bench.total_nbytes
    rates = (timings.rate_text(name, nbytes) for name in (ours, raw))
    return Row(
        group=GROUP,
        subject=f"{ours}, {bench.words}, of raw",
        value=timings.ratio(raw, ours),
        target=_TARGET,
        how=f"{', '.join(rates)}; {how}",
        seconds=timings.seconds,
    )

"""A cold, verified load into place, against the raw disk and the ceiling."""

from mpickpt.bench.bench import Bench, Reading
from mpickpt.bench.ceiling import CEILING, copy_and_digest
from mpickpt.bench.raw import raw_reads
from mpickpt.bench.rounds import Timings, Way
from mpickpt.bench.rows import Row, at_least
from mpickpt.bench.save import rate_row
from mpickpt.format.digest import crc32
from mpickpt.parallel.load import load_sharded
from mpickpt.storage.regions import bytes_of

GROUP = "load"
SHA256, CRC32 = "load, SHA-256", "load, CRC-32"
_VERIFY = {SHA256: "sha256", CRC32: "crc32"}


def measure_load(bench: Bench) -> list[Row]:
    """Measure loads against min(raw, ceiling), and against raw."""
    timings, share = time_reads(bench)
    raw = timings.fastest("raw read")
    bounds = {SHA256: timings.slowest(raw, CEILING), CRC32: raw}
    nbytes = bench.total_nbytes
    rows = [rate_row(bench, GROUP, "raw read, cold, fastest way", raw, timings)]
    for ours, bound in bounds.items():
        of_whom = "ceiling" if bound == CEILING else "raw"
        rates = [timings.rate_text(name, nbytes) for name in (ours, bound)]
        rows.append(
            Row(
                group=GROUP,
                subject=f"{ours}, into place, cold, of {of_whom}",
                value=timings.ratio(bound, ours),
                target=at_least(0.95),
                how=f"{', '.join(rates)}; {share}",
            )
        )
    return rows


def time_reads(bench: Bench) -> tuple[Timings, str]:
    """Time raw reads, the ceiling and the library's loads of one checkpoint.

    Returns
    -------
    Timings, str
        And how cold the library's reads were, in words.
    """
    bench.clear()
    bench.save()
    bench.ranks.barrier()
    (shard,) = bench.checkpoint.glob(f"rank{bench.ranks.rank:05d}-*.h5")
    loads = {name: Reading(loading(bench, verify)) for name, verify in _VERIFY.items()}
    before = disturb(bench)
    timings = bench.take_turns_cold(
        raw_reads(bench, shard)
        | {CEILING: lambda: copy_and_digest(bench.arrays.values())}
        | loads
    )
    require_loaded(bench, before)
    return timings, how_cold(bench, loads[SHA256])


def loading(bench: Bench, verify: str) -> Way:
    """Return the way that loads the checkpoint into the state's own arrays."""

    def load() -> None:
        load_sharded(
            bench.checkpoint,
            comm=bench.ranks.comm,
            like=bench.state(),
            verify=verify,
        )

    return load


def disturb(bench: Bench) -> int:
    """Change every page of the state; return what to give to `require_loaded`."""
    before = _digest(bench)
    for array in bench.arrays.values():
        bytes_ = bytes_of(array)
        for place in range(0, len(bytes_), 4096):
            bytes_[place] ^= 0xFF
    return before


def require_loaded(bench: Bench, before: int) -> None:
    """Raise unless the state is again what it was before `disturb`."""
    if _digest(bench) != before:
        raise AssertionError("a load did not bring back what was saved")


def how_cold(bench: Bench, reading: Reading) -> str:
    """Return how much of the reads a disk served, in words."""
    nbytes, is_from_disk = reading.nbytes(bench.ranks)
    if not is_from_disk:
        return "this file system does not tell what it read from a disk"
    return f"{nbytes / bench.total_nbytes:.0%} of the bytes came from the disk"


def _digest(bench: Bench) -> int:
    value = 0
    for array in bench.arrays.values():
        value = crc32(bytes_of(array), value)
    return value

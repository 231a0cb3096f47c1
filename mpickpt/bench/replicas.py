"""What it costs to find replicas that differ, as a share of the save."""

import numpy as np

from mpickpt.bench.bench import Bench, random_bytes
from mpickpt.bench.rounds import Way
from mpickpt.bench.rows import Row, not_run
from mpickpt.parallel.save import save_sharded
from mpickpt.state import Check, Replicated

GROUP = "replicas"
CHECKS: tuple[Check, ...] = ("off", "rotate", "full")


def measure_replicas(bench: Bench) -> list[Row]:
    """Measure saves of replicated arrays with each kind of check."""
    subject = "digest check of replicas, share of the save"
    if bench.ranks.size == 1:
        return [not_run(GROUP, subject, "needs 2 ranks")]
    replica = random_bytes(np.random.default_rng(0), bench.nbytes)

    def saving(check: Check) -> Way:
        tree = {"w": Replicated(replica, check=check)}

        def save() -> None:
            save_sharded(tree, bench.checkpoint, step=0, comm=bench.ranks.comm)

        return save

    timings = bench.take_turns({check: saving(check) for check in CHECKS})
    return [
        Row(
            group=GROUP,
            subject=f'{subject}, "{check}"',
            value=100 * (1 - timings.ratio("off", check)),
            unit="%",
            how=", ".join(map(timings.millis_text, CHECKS)),
            seconds=timings.seconds if check == "rotate" else {},
        )
        for check in CHECKS[1:]
    ]

"""What people wait for at a prompt: imports, and a list of checkpoints."""

import subprocess
import sys
from functools import partial

import numpy as np

from mpickpt.bench.bench import Bench
from mpickpt.bench.rounds import Timings, take_turns
from mpickpt.bench.rows import Row, at_most
from mpickpt.parallel.save import save_sharded
from mpickpt.state import Sharded
from mpickpt.storage.catalog import step_path

IMPORTS = {
    "numpy": "import numpy",
    "mpickpt": "import mpickpt",
    "save_sharded": "from mpickpt import save_sharded, load_sharded",
}
_EMPTY = "an empty program"
_LS = "mpickpt ls"
_N_CHECKPOINTS = 100


def measure_startup(bench: Bench) -> list[Row]:
    """Measure imports against numpy's, and `mpickpt ls` of 100 checkpoints."""
    run = bench.directory / "run"
    bench.ranks.from_root(lambda: _fill(bench))

    def start(*arguments: str) -> None:
        if bench.ranks.rank == 0:
            command = [sys.executable, *arguments]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    programs: dict[str, tuple[str, ...]] = {
        name: ("-c", code) for name, code in IMPORTS.items()
    }
    programs |= {_EMPTY: ("-c", ""), _LS: ("-m", "mpickpt", "ls", str(run))}
    timings = take_turns(
        bench.ranks,
        {name: partial(start, *words) for name, words in programs.items()},
        repeat=bench.repeat,
        before=bench.ranks.barrier,
    )
    return [
        _import_row(timings, "mpickpt", "import mpickpt"),
        _import_row(timings, "save_sharded", "import of save_sharded and load_sharded"),
        Row(
            group="startup",
            subject=f"mpickpt ls of {_N_CHECKPOINTS} checkpoints",
            value=timings.median(_LS),
            unit="s",
            target=at_most(0.5),
            how=timings.millis_text(_EMPTY),
        ),
    ]


def _import_row(timings: Timings, name: str, subject: str) -> Row:
    return Row(
        group="startup",
        subject=f"{subject}, times import numpy",
        value=timings.ratio(name, "numpy"),
        target=at_most(1.5) if name == "mpickpt" else None,
        how=", ".join(map(timings.millis_text, (name, "numpy", _EMPTY))),
        seconds=timings.seconds if name == "mpickpt" else {},
    )


def _fill(bench: Bench) -> None:
    for step in range(_N_CHECKPOINTS):
        path = step_path(bench.directory / "run", step)
        save_sharded({"x": Sharded.block(np.zeros(8))}, path, step=step)

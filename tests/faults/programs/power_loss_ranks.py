"""MPI program: the power goes at one call of a save, again and again, each time anew.

Arguments: a file with the cases as JSON, and a directory to mount disks below. Rank 0
writes a line for each case, as soon as it is judged.
"""

import json
import logging
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mpi4py import MPI

from tests.faults.matrix import Verdict
from tests.faults.power_loss_cuts import END, FLAGS, Cuts, ending_of, judge
from tests.faults.power_loss_disk import Disk, disk_at
from tests.faults.power_loss_recording import Hooks, act_as_rank
from tests.faults.power_loss_scenarios import SCENARIOS

COMM = MPI.COMM_WORLD


def main() -> None:
    logging.disable(logging.CRITICAL)
    act_as_rank(COMM.rank)
    cases, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    for number, case in enumerate(cases):
        verdict = verdict_of(case, folder / f"disk{number}")
        if COMM.rank == 0:
            print("verdict", json.dumps([case["name"], asdict(verdict)]), flush=True)


def verdict_of(case: dict[str, Any], folder: Path) -> Verdict:
    scenario, verdict = SCENARIOS[case["scenario"]], Verdict()
    disk = disk_at(folder, case["file_system"])
    if COMM.rank == 0:
        disk = Disk(folder, case["file_system"], Path(case["image"]))
        disk.mount()
    wait_for_all()
    cuts = Cuts(disk, FLAGS[case["flag"]], case["label"])
    stages, outcome = [0], None
    with Hooks(disk.root, cuts.around).installed():
        try:
            scenario.act(disk.root / "run", COMM, stages.append)
        except Exception as error:
            outcome = error
    everywhere = COMM.gather((max(stages), outcome, cuts.is_cut))
    if COMM.rank == 0:
        if case["label"] == END:
            disk.cut_power(FLAGS[case["flag"]])
        disk.unmount()
        # Every promise of these scenarios comes after all calls.
        was_cut = any(is_cut for _, _, is_cut in everywhere)
        reached = [stage for stage, _, _ in everywhere]
        promised = [0] if was_cut else reached
        outcomes = [outcome for _, outcome, _ in everywhere]
        ending = ending_of(promised, reached, outcomes)
        with disk.mounted() as root:
            verdict = judge(scenario, root / "run", ending, COMM.size)
        disk.close()
        if case["label"] != END and not was_cut:
            verdict = Verdict(silent=f"no call {case['label']} was made")
    wait_for_all()
    return verdict


def wait_for_all() -> None:
    request = COMM.Ibarrier()
    while not request.Test():
        time.sleep(1e-3)


main()

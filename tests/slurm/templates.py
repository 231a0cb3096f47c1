"""Fills in the marked block of a batch script of slurm/, as its user would."""

import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
TEMPLATES = ("plain", "requeue", "staging", "array")
BEGIN, END = "# ======== edit from here ========\n", "# ======== to here ========\n"
SHARED = "# The rest is the same in all templates, and needs no edit.\n"


def template(name: str) -> str:
    """Return a template as it is."""
    return (REPOSITORY / "slurm" / f"{name}.sbatch").read_text()


def parts_of(text: str) -> tuple[str, str, str]:
    """Return what stands before, in and after the marked block."""
    before, rest = text.split(BEGIN)
    block, after = rest.split(END)
    return before, block, after


def edited(
    name: str,
    *,
    run_dir: Path,
    program: Sequence[str],
    launcher: Sequence[str],
    staged: Sequence[str] = (),
    local_run: str = "",
) -> str:
    """Return a template whose marked block says what to run here.

    `{task}` in `run_dir` and `{local}` in `program` stand for the variables that
    tell a task of an array, and the directory on the nodes. With `local_run`, the
    lines for tiers are no comments.
    """
    before, block, after = parts_of(template(name))
    arguments = shlex.join(program).replace("'{local}", '"$local_dir"\'')
    task = str(run_dir).replace("{task}", "$SLURM_ARRAY_TASK_ID")
    bin_directory = Path(sys.executable).parent
    edits = [
        (r"^run_dir=[^\n]*$", f'run_dir="{task}"'),
        (r"^    source [^\n]*$", f"    export {_environment(bin_directory)}"),
        (r"^launcher=\(.*?\)$", f"launcher=({shlex.join(launcher)})"),
        (r"^program=\(.*?\)$", f'program=({arguments} --run "$run_dir")'),
    ]
    if staged:
        edits.append((r"^staged=\(.*?\)$", f"staged=({shlex.join(staged)})"))
    if local_run:
        block = re.sub(
            r"^# (local_run=|flush\(|    NODE_T|})", r"\1", block, flags=re.M
        )
        edits.append((r"^local_run=[^\n]*$", f"local_run={shlex.quote(local_run)}"))
    for pattern, line in edits:
        block, count = re.subn(
            pattern, lambda _, line=line: line, block, flags=re.M | re.S
        )
        assert count == 1, (name, pattern)
    return before + BEGIN + block + END + after


def _environment(bin_directory: Path) -> str:
    variables = {
        "PATH": f"{bin_directory}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
    }
    return shlex.join(f"{name}={value}" for name, value in variables.items())

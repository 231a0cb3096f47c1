"""Parses the command line, runs one command, turns errors into an exit status."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

import mpickpt
from mpickpt.cli import status
from mpickpt.cli.output import shown
from mpickpt.cli.status import UsageError, status_of
from mpickpt.errors import CheckpointError

_COMMANDS = {
    "ls": "list the checkpoints of a run",
    "latest": "print the path of the checkpoint of the highest step",
    "show": "show what a checkpoint holds",
    "verify": "verify a checkpoint, or all of a run, against the saved digests",
    "diff": "compare two checkpoints bit by bit; exit status 3 if they differ",
    "export": "write arrays as a .npy file or as safetensors",
    "import": "save a checkpoint of DeepSpeed, DCP or NeMo as one of ours",
    "cp": "copy a checkpoint to another directory or store, verified",
    "flush": "copy the checkpoints of a run that another place does not have",
    "prune": "remove the checkpoints of a run that no rule keeps",
    "pin": "keep checkpoints whatever the rules say",
    "unpin": "let the rules decide about checkpoints again",
    "rm": "remove checkpoints",
    "set-metric": "say by what a checkpoint is measured",
    "halt": "ask a run to save once more and stop",
    "plan": "say what the checkpoints of a job will cost, and how often to save",
    "doctor": "say what a directory is like as a place for checkpoints",
    "bench": "measure speed and memory under mpiexec, against what the machine can do",
}
# Rooms of their own, which talk MPI.
_HOMES = {
    "import": "mpickpt.interop.import_command",
    "bench": "mpickpt.bench.command",
    "doctor": "mpickpt.doctor.command",
}
_EPILOG = """\
exit status:
  0  all is well                    3  damaged; for diff: different
  1  the command failed             4  there is no checkpoint
  2  wrong usage, unknown key       5  the file system refused: I/O, permission
  6  flush: something is left to do
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status.

    Parameters
    ----------
    arguments : sequence of str, optional
        By default those of the program.
    """
    # Paths are bytes: they leave as they came, whatever the locale.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="surrogateescape")
    words = sys.argv[1:] if arguments is None else arguments
    options = _parser(words).parse_args(words)
    try:
        result: int = options.run(options)
        sys.stdout.flush()
    except UsageError as error:
        return _complain(str(error), status.USAGE)
    except CheckpointError as error:
        return _complain(str(error), status_of(error))
    except RecursionError:
        # A user's metadata may be deeper than what prints it.
        return _complain("nested too deeply to be shown", status.FAILED)
    except BrokenPipeError:
        # Else Python complains when it flushes standard output at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return status.BROKEN_PIPE
    except KeyboardInterrupt:
        return status.INTERRUPTED
    return result


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mpickpt",
        description="Look at checkpoints and tidy up: no MPI, no HDF5 library, but for "
        "import, doctor and bench.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"mpickpt {mpickpt.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, help_text in _COMMANDS.items():
        subparser = commands.add_parser(name, help=help_text, description=help_text)
        # Login nodes feel every import, so only what is going to run is imported.
        if name in arguments:
            home = _HOMES.get(name, f"mpickpt.cli.{name.replace('-', '_')}")
            command = import_module(home)
            command.add_arguments(subparser)
            subparser.set_defaults(run=command.run)
    return parser


def _complain(text: str, exit_status: int) -> int:
    sys.stderr.write(f"mpickpt: {shown(text)}\n")
    return exit_status

"""`mpickpt set-metric RUN STEP name=value...`: say by what one is measured."""

import argparse
import math

from mpickpt.cli.output import print_line
from mpickpt.cli.run_arguments import add_run_argument, existing_run, step
from mpickpt.cli.status import WHOLE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    add_run_argument(parser)
    parser.add_argument("step", metavar="STEP", type=step)
    parser.add_argument("metrics", metavar="NAME=VALUE", type=metric, nargs="+")


def run(options: argparse.Namespace) -> int:
    """Join the metrics to those of the checkpoint."""
    metrics = dict(options.metrics)
    existing_run(options).set_metrics(options.step, metrics)
    words = ", ".join(f"{name}={value:g}" for name, value in metrics.items())
    print_line(f"step {options.step}: {words}")
    return WHOLE


def metric(text: str) -> tuple[str, float]:
    """Return the name and the number of "loss=0.5"."""
    name, equals, value = text.rpartition("=")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not name or not equals or not math.isfinite(number):
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected NAME=VALUE with a finite number, as in loss=0.5"
        )
    return name, number

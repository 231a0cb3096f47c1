"""Runs the command line: `python -m mpickpt`."""

import sys

from mpickpt.cli.main import main

sys.exit(main())

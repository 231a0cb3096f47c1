"""MPI program: goes to a node, then runs the command line there.

Arguments: a process of each node as JSON, then what `mpickpt` is given.
"""

import json
import sys

from tests.faults.programs.network_node import enter_node

enter_node(json.loads(sys.argv[1]), 0)

from mpickpt.cli.main import main  # noqa: E402 (MPI's threads could not move)

sys.exit(main(sys.argv[2:]))

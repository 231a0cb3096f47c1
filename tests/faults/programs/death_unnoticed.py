"""Runs death_job.py in a process of its own, whose death mpiexec is not told of.

MPICH's mpiexec ends the other ranks when one dies, now and then even if it is told
not to. So that they live, as after the loss of a node that nobody has noticed, this
process stays between them.
"""

import subprocess
import sys
import time
from pathlib import Path

LONG_S = 300.0

program = Path(__file__).with_name("death_job.py")
# With all descriptors: one of them leads to mpiexec.
subprocess.run([sys.executable, str(program), *sys.argv[1:]], close_fds=False)
time.sleep(LONG_S)

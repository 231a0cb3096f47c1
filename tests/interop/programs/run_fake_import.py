"""mpiexec -n N python run_fake_import.py WORD...: `mpickpt import` of a fake source."""

import sys

from mpickpt.cli.main import main
from mpickpt.interop import import_command

for kind in list(import_command.KINDS):
    import_command.KINDS[kind] = ("tests.interop.fake_importer", kind)
sys.exit(main(["import", *sys.argv[1:]]))

"""An import of a large checkpoint streams: memory does not grow with it."""

import subprocess
import sys
import warnings

import pytest

torch = pytest.importorskip("torch")
from torch.distributed import checkpoint as torch_dcp  # noqa: E402

from tests.interop.torch_compare import bits_of, loaded_by_us  # noqa: E402

NBYTES = 384 << 20
MOST_GROWN_KIB = 150 << 10
IMPORT = """
import sys
import numpy as np
from mpickpt import importers, save_sharded

def peak_kib():  # since this program was started, unlike getrusage
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

save_sharded({"w": np.zeros(3)}, sys.argv[2] + "/small", step=0)
before = peak_kib()
importers.dcp(sys.argv[1], sys.argv[2] + "/ours")
print(peak_kib() - before)
"""


@pytest.mark.slow
def test_import_of_a_large_checkpoint_takes_little_memory(tmp_path):
    columns = 6 << 10
    rows = NBYTES // 4 // 2 // columns
    numbers = torch.arange(rows * columns, dtype=torch.float32)
    state = {
        "straight": numbers.reshape(rows, columns),
        # Its elements lie in another order in the file than in the array.
        "turned": numbers.reshape(columns, rows).t(),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_dcp.save(state, checkpoint_id=str(tmp_path / "dcp"))

    command = [sys.executable, "-c", IMPORT, str(tmp_path / "dcp"), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)

    assert ended.returncode == 0, ended.stderr
    print(f"{int(ended.stdout)} KiB for {NBYTES >> 10} KiB")
    assert int(ended.stdout) < MOST_GROWN_KIB
    ours = loaded_by_us(tmp_path / "ours")
    for name, tensor in state.items():
        assert ours[name].tobytes() == bits_of(tensor)

"""File systems of their own, in a file, for tests that need a real one."""

import contextlib
import os
import shutil
import subprocess

import pytest

IMAGE_NBYTES = 400 << 20  # XFS makes none below 300 MiB; the file has holes


@contextlib.contextmanager
def mounted(folder, make, options=""):
    """Make a file system by a command, mount it, or skip the test with the reason."""
    program = make.split()[0]
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not here")
    image, point = folder / "image", folder / "disk"
    with open(image, "wb") as file:
        file.truncate(IMAGE_NBYTES)
    subprocess.run([*make.split(), str(image)], check=True, stdout=subprocess.DEVNULL)
    point.mkdir()
    said = ",".join(["loop", *([options] if options else [])])
    mount = ["mount", "-o", said, str(image), str(point)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{program} can be made here, not mounted: {done.stderr.strip()}")
    try:
        yield point
    finally:
        subprocess.run(["umount", "-l", str(point)], check=True)

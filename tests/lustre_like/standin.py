"""Mounts what stands for Lustre, with what stands for its `lfs`."""

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.lustre_like.layout_bytes import Plain, unpack
from tests.mpi_launch import REPOSITORY

N_OSTS = 8

_LAYOUT, _SETTINGS = "lustre.lov", "user.lustre_like.settings"
_START_TIMEOUT_S = 20.0
_BEHAVIOURS = {
    "works": "exec {program}",
    "fails": 'case "$1" in --version) exec {program} ;; esac; exit 1',
    "hangs": "exec sleep 600",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LustreLike:
    """A mounted stand-in.

    Attributes
    ----------
    point : Path
        Where it is mounted.
    folder : Path
        Where its logs and its `lfs` are.
    """

    point: Path
    folder: Path

    def settle(self, **settings: object) -> None:
        """Have it forget what was, and behave as `mount.py` says."""
        os.setxattr(self.point, _SETTINGS, json.dumps(settings).encode())
        self.forget_operations()

    def forget_operations(self) -> None:
        """Begin the logs anew."""
        (self.folder / "operations").write_text("")
        (self.folder / "lfs").write_text("")

    def set_layout(self, path: Path, layout: bytes) -> None:
        """Set a layout without a trace in the logs."""
        os.setxattr(path, _LAYOUT, layout)
        self.forget_operations()

    def layout_of(self, path: Path) -> list[Plain]:
        """Return the layout of a file or directory."""
        return unpack(os.getxattr(path, _LAYOUT))

    def operations(self) -> list[tuple[str, Path]]:
        """Return what was made, renamed and striped, in order."""
        lines = (self.folder / "operations").read_text().splitlines()
        found = [json.loads(line) for line in lines]
        return [(each["op"], self.point / each["path"][1:]) for each in found]

    def install_lfs(self, behaviour: str) -> Path:
        """Make an `lfs` that works, fails or hangs; return its folder, for PATH."""
        folder = self.folder / "bin"
        folder.mkdir(exist_ok=True)
        program = shlex.join(
            [sys.executable, str(REPOSITORY / "tests/lustre_like/lfs.py")]
        )
        settings = {
            "PYTHONPATH": str(REPOSITORY),
            "LFS_LOG": str(self.folder / "lfs"),
            "LFS_N_OSTS": str(N_OSTS),
        }
        exports = "".join(
            f"export {name}={shlex.quote(value)}\n" for name, value in settings.items()
        )
        body = _BEHAVIOURS[behaviour].format(program=f'{program} "$@"')
        command = folder / "lfs"
        command.write_text(f"#!/bin/sh\n{exports}{body}\n")
        command.chmod(0o755)
        return folder

    def lfs_calls(self) -> list[list[str]]:
        """Return the arguments with which `lfs` was called."""
        lines = (self.folder / "lfs").read_text().splitlines()
        return [json.loads(line) for line in lines]


def why_not() -> str | None:
    """Return what this machine lacks for the stand-in, or None."""
    if os.geteuid() != 0:
        return "not root, so nothing can be mounted"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "no /dev/fuse"
    missing = [name for name in ("fusermount3", "setpriv") if not shutil.which(name)]
    return f"not installed: {', '.join(missing)}" if missing else None


@contextlib.contextmanager
def lustre_like(folder: Path) -> Iterator[LustreLike]:
    """Mount a stand-in that is gone afterwards."""
    files, point = folder / "files", folder / "scratch"
    files.mkdir(parents=True)
    point.mkdir()
    log = folder / "operations"
    log.touch()
    (folder / "lfs").touch()
    program = REPOSITORY / "tests/lustre_like/mount.py"
    with (folder / "mount.log").open("w") as said:
        # Unmounts, and ends, when the test is killed.
        tied = ["setpriv", "--pdeathsig", "TERM", sys.executable]
        server = subprocess.Popen(
            [*tied, str(program), str(files), str(point), str(log)],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        )
    try:
        _wait_for(point, server, folder / "mount.log")
        yield LustreLike(point=point, folder=folder)
    finally:
        subprocess.run(["umount", "-l", str(point)], check=False)
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _wait_for(point: Path, server: "subprocess.Popen[bytes]", said: Path) -> None:
    end = time.monotonic() + _START_TIMEOUT_S
    while not point.is_mount():
        if server.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"nothing is mounted: {said.read_text()}")
        time.sleep(0.02)

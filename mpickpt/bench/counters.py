"""What the kernel counts of this process: bytes read, peak memory; Linux's /proc."""

from contextlib import suppress
from pathlib import Path

_IO = Path("/proc/self/io")
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


def nbytes_from_disk() -> int:
    """Return the bytes that this process has had fetched from a disk or a server."""
    return _counter("read_bytes")


def nbytes_asked_for() -> int:
    """Return the bytes that this process has read, from caches too."""
    return _counter("rchar")


def resident_nbytes() -> int:
    """Return the memory that this process has."""
    return _status("VmRSS")


def peak_nbytes() -> int:
    """Return the most memory that this process has had since `forget_peak`."""
    return _status("VmHWM")


def forget_peak() -> bool:
    """Let the peak of memory begin at what there is now; False where it cannot."""
    with suppress(OSError):
        _CLEAR_REFS.write_text(_RESET_PEAK)
        return True
    return False


def _counter(name: str) -> int:
    with suppress(OSError, KeyError):
        lines = (line.partition(":") for line in _IO.read_text().splitlines())
        return int({key: value for key, _, value in lines}[name])
    return 0


def _status(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    return 0

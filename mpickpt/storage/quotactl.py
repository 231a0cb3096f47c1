"""Asks the kernel for the quotas of a local file system: quotactl(2)."""

import errno
import os
import struct
import time
from pathlib import Path

from mpickpt.storage.quota_tables import Use

_TYPES = {"user": 0, "group": 1, "project": 2}
# linux/quota.h and linux/dqblk_xfs.h; ext4 answers the calls of XFS as well.
_Q_GETQUOTA = 0x800007
_Q_XGETQSTAT = 0x5805
_QUOTACTL_FD = 443  # its number everywhere but on Alpha; Linux 5.14
_DQBLK = struct.Struct("=8QI")
_UNIT_NBYTES = 1024
_IS_ENFORCED = {"user": 1 << 1, "group": 1 << 3, "project": 1 << 5}
_ANSWER_NBYTES = 512


def kernel_quota(
    directory: Path, device: str, kind: str, number: int
) -> tuple[Use, Use, bool] | None:
    """Return the quota of a user, a group or a project, None if there are no quotas.

    Parameters
    ----------
    directory : Path
        Lies on the file system.
    device : str
        That holds it: what older kernels want to be told.
    kind : {"user", "group", "project"}
        Whose quota. That of a project only root may ask for.
    number : int
        Of the user, group or project.

    Returns
    -------
    (Use, Use, bool) or None
        Of bytes, of files, and whether limits are enforced.

    Raises
    ------
    OSError
        The kernel does not tell.
    """
    try:
        raw = _ask(directory, device, _Q_GETQUOTA, kind, number)
    except OSError as error:
        # Quotas are off; XFS knows nothing of those who have never written.
        if error.errno in (errno.ESRCH, errno.ENOENT):
            return None
        raise
    hard, soft, used, hard_files, soft_files, files, end, files_end, _ = (
        _DQBLK.unpack_from(raw)
    )
    now_s = time.time()
    space = Use(
        used=used,
        soft=soft * _UNIT_NBYTES,
        hard=hard * _UNIT_NBYTES,
        is_late=0 < end <= now_s,
    )
    of_files = Use(
        used=files, soft=soft_files, hard=hard_files, is_late=0 < files_end <= now_s
    )
    return space, of_files, _is_enforced(directory, device, kind)


def _is_enforced(directory: Path, device: str, kind: str) -> bool:
    """Tell whether limits are more than counted."""
    try:
        raw = _ask(directory, device, _Q_XGETQSTAT, kind, 0)
    except OSError:
        return False
    (flags,) = struct.unpack_from("=H", raw, 2)
    return bool(flags & _IS_ENFORCED[kind])


def _ask(directory: Path, device: str, call: int, kind: str, number: int) -> bytes:
    import ctypes  # takes some milliseconds, which most commands need not

    libc = ctypes.CDLL(None, use_errno=True)
    answer = ctypes.create_string_buffer(_ANSWER_NBYTES)
    command = call << 8 | _TYPES[kind]
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Needs no name of the device, which a container may not have.
        failed = libc.syscall(
            ctypes.c_long(_QUOTACTL_FD),
            ctypes.c_long(descriptor),
            ctypes.c_long(command),
            ctypes.c_long(number),
            answer,
        )
        number_of_error = ctypes.get_errno()
    finally:
        os.close(descriptor)
    if failed and number_of_error in (errno.ENOSYS, errno.EPERM):
        failed = libc.quotactl(
            ctypes.c_uint(command).value, os.fsencode(device), number, answer
        )
        number_of_error = ctypes.get_errno()
    if failed:
        raise OSError(number_of_error, os.strerror(number_of_error), str(directory))
    return answer.raw

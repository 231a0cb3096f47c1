"""FUSE program: a directory as a client of NFS sees it that looks seldom.

Names that were absent are remembered as absent, and sizes as they were, until the
directory is listed or the file is opened: that asks the server. Two of these over one
directory are two clients. Arguments: the directory, where to mount it.

More than that is set through the extended attribute `SETTINGS` of the root, as JSON:

hidden_s : float
    Age below which what the other client made is not there, not even listed; of a
    directory, since it was first looked for.
stale_open : [pattern, seconds]
    Opening such a file fails with ESTALE, from the first time on for so long.
stale_read : [pattern, count]
    As many first handles of such a file fail with ESTALE at their first read, and
    from then on.
"""

import errno
import json
import os
import stat
import sys
import threading
import time
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

import mfusepy as fuse

SETTINGS = "user.network.settings"
ABSENT_S = 30.0
ATTRIBUTES_S = 3.0

_FIELDS = ("st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_ino")
_TIMES = ("st_atime", "st_mtime", "st_ctime")
_ROOM = ("f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_frsize", "f_namemax")


class NfsLike(fuse.Operations):
    """One client."""

    use_ns = True

    def __init__(self, root):
        self.root = os.path.realpath(root)
        self.memory = threading.Lock()
        self.own = set()
        self.use({})

    def use(self, settings):
        """Forget what was seen, and behave as told from now on."""
        with self.memory:
            self.settings = {"hidden_s": 0.0} | settings
            self.absent, self.seen, self.first_looked = {}, {}, {}
            self.stale_since, self.stale_handles = {}, set()
            self.n_stale_reads = {}

    def place(self, path):
        return self.root + path

    # What a client remembers.

    def getattr(self, path, fh=None):
        now = time.monotonic()
        with self.memory:
            if self.absent.get(path, 0.0) > now:
                raise fuse.FuseOSError(errno.ENOENT)
            attributes, until = self.seen.get(path, (None, 0.0))
        if until > now:
            return attributes
        attributes = self.fresh(path)
        with self.memory:
            if attributes is None:
                self.absent[path] = now + ABSENT_S
                raise fuse.FuseOSError(errno.ENOENT)
            self.seen[path] = attributes, now + ATTRIBUTES_S
        return attributes

    def fresh(self, path):
        """Return what the server says, None where nothing is."""
        try:
            found = os.lstat(self.place(path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        if self.is_hidden(path, found):
            return None
        fields = {name: getattr(found, name) for name in _FIELDS}
        return fields | {name: getattr(found, f"{name}_ns") for name in _TIMES}

    def is_hidden(self, path, found):
        if path in self.own or path == "/" or not self.settings["hidden_s"]:
            return False
        born = found.st_ctime
        if stat.S_ISDIR(found.st_mode):
            # What is made in a directory changes its times; when it was made itself,
            # nobody tells.
            with self.memory:
                born = self.first_looked.setdefault((path, found.st_ino), time.time())
        return time.time() - born < self.settings["hidden_s"]

    def forget(self, path, *, is_own=False):
        with self.memory:
            self.absent.pop(path, None)
            self.seen.pop(path, None)
            self.seen.pop(str(PurePosixPath(path).parent), None)
            (self.own.add if is_own else self.own.discard)(path)

    def readdir(self, path, fh):
        names = os.listdir(self.place(path))
        below = path.rstrip("/") + "/"
        with self.memory:
            for known in (self.absent, self.seen):
                for name in [n for n in known if n.rpartition("/")[0] + "/" == below]:
                    del known[name]
        shown = [name for name in names if self.fresh(below + name) is not None]
        return [".", "..", *shown]

    # What goes to the server.

    def open(self, path, flags):
        self.fail_if_stale(path)
        self.forget(path, is_own=path in self.own)
        try:
            return os.open(self.place(path), flags & ~os.O_APPEND & ~os.O_DIRECT)
        except FileNotFoundError:
            raise fuse.FuseOSError(errno.ESTALE) from None

    def fail_if_stale(self, path):
        pattern, seconds = self.settings.get("stale_open", ("", 0.0))
        if fnmatchcase(path, pattern):
            with self.memory:
                since = self.stale_since.setdefault(path, time.monotonic())
            if time.monotonic() - since < seconds:
                raise fuse.FuseOSError(errno.ESTALE)

    def read(self, path, size, offset, fh):
        pattern, count = self.settings.get("stale_read", ("", 0))
        with self.memory:
            if fh not in self.stale_handles and fnmatchcase(path, pattern):
                self.n_stale_reads[path] = self.n_stale_reads.get(path, 0) + 1
                if self.n_stale_reads[path] <= count:
                    self.stale_handles.add(fh)
            if fh in self.stale_handles:
                raise fuse.FuseOSError(errno.ESTALE)
        return os.pread(fh, size, offset)

    def release(self, path, fh):
        with self.memory:
            self.stale_handles.discard(fh)
        os.close(fh)

    def create(self, path, mode, fi=None):
        # The kernel has looked whether it is there, which is too early: of two clients
        # that create a file for themselves alone, one must fail.
        alone = os.O_EXCL & (fi or 0)
        flags = os.O_CREAT | os.O_RDWR | os.O_TRUNC | alone
        descriptor = os.open(self.place(path), flags, mode)
        self.forget(path, is_own=True)
        return descriptor

    def write(self, path, data, offset, fh):
        with self.memory:
            self.seen.pop(path, None)
        return os.pwrite(fh, data, offset)

    def truncate(self, path, length, fh=None):
        self.forget(path, is_own=path in self.own)
        os.truncate(self.place(path), length)

    def fsync(self, path, datasync, fh):
        os.fsync(fh)  # noqa: TID251 (what is asked of it)

    def fsyncdir(self, path, datasync, fh):
        pass

    def opendir(self, path):
        return 0

    def rename(self, old, new, flags=0):
        self.forget(old)
        self.forget(new, is_own=True)
        os.rename(self.place(old), self.place(new))  # noqa: TID251

    def unlink(self, path):
        self.forget(path)
        os.unlink(self.place(path))

    def mkdir(self, path, mode):
        self.forget(path)
        os.mkdir(self.place(path), mode)
        self.forget(path, is_own=True)

    def rmdir(self, path):
        self.forget(path)
        os.rmdir(self.place(path))

    def chmod(self, path, mode):
        os.chmod(self.place(path), mode)

    def utimens(self, path, times=None):
        os.utime(self.place(path), ns=times)

    def statfs(self, path):
        room = os.statvfs(self.place(path))
        return {name: getattr(room, name) for name in _ROOM}

    def setxattr(self, path, name, value, options, position=0):
        if (path, name) != ("/", SETTINGS):
            raise fuse.FuseOSError(errno.ENOTSUP)
        self.use(json.loads(bytes(value)))

    def getxattr(self, path, name, position=0):
        raise fuse.FuseOSError(errno.ENODATA)

    def listxattr(self, path):
        return []


def main():
    """Serve until the mount is gone."""
    fuse.FUSE(
        NfsLike(sys.argv[1]),
        sys.argv[2],
        foreground=True,
        nothreads=False,
        fsname="nfs-like",
        direct_io=True,
        attr_timeout=0,
        entry_timeout=0,
        negative_timeout=0,
    )


main()

"""FUSE program: a directory as a client of Lustre sees it, as far as layouts go.

It stands for Lustre in that it is mounted as "fuse.lustre" and keeps the attribute
"lustre.lov": files and directories inherit it from the directory when they are made,
those in a directory without one have that of the root, and of a file, which has its
objects already, setting it reports success and changes nothing. It stripes nothing.
Arguments: the directory, where to mount it, a file that operations are logged to.

How it behaves is set through the attribute `SETTINGS` of the root, as JSON:

refusal : str
    Name of the error with which layouts are refused: "EPERM".
most_count : int
    A larger stripe count is taken as this one, without a word.
n_osts : int
    Number of OSTs that -1 means.
"""

import errno
import json
import os
import sys
import threading

import mfusepy as fuse

from tests.lustre_like import layout_bytes

LAYOUT = "lustre.lov"
SETTINGS = "user.lustre_like.settings"
BLOCK_NBYTES = 4 << 20

_FIELDS = ("st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_ino")
_TIMES = ("st_atime", "st_mtime", "st_ctime")
_ROOM = (
    *("f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_frsize", "f_namemax"),
    *("f_favail", "f_ffree", "f_files"),
)


class LustreLike(fuse.Operations):
    """One client."""

    use_ns = True

    def __init__(self, root, log):
        self.root = os.path.realpath(root)
        self.memory = threading.RLock()
        self.log = log
        self.use({})

    def use(self, settings):
        """Forget all layouts, and behave as told from now on."""
        known = {"refusal": None, "most_count": None, "n_osts": 8}
        with self.memory:
            self.settings, self.layouts = known | settings, {}

    def place(self, path):
        return self.root + path

    def note(self, operation, path, **more):
        line = json.dumps({"op": operation, "path": path, **more})
        with self.memory, open(self.log, "a") as log:
            log.write(line + "\n")

    # Layouts.

    def setxattr(self, path, name, value, options, position=0):
        if (path, name) == ("/", SETTINGS):
            self.use(json.loads(bytes(value)))
        elif name == LAYOUT:
            self.note("setxattr", path, value=bytes(value).hex())
            self.set_layout(path, bytes(value))
        else:
            raise fuse.FuseOSError(errno.ENOTSUP)

    def set_layout(self, path, value):
        if self.settings["refusal"]:
            raise fuse.FuseOSError(getattr(errno, self.settings["refusal"]))
        try:
            components = layout_bytes.unpack(value)
        except ValueError:
            raise fuse.FuseOSError(errno.EINVAL) from None
        if any(each.size % 65536 for each in components):
            raise fuse.FuseOSError(errno.EINVAL)
        if not os.path.isdir(self.place(path)):
            return
        most = self.settings["most_count"]
        if most is not None and not layout_bytes.is_composite(value):
            (only,) = components
            count = min(only.count, most)
            kept = layout_bytes.Plain(count=count, size=only.size, pool=only.pool)
            value = kept.pack()
        with self.memory:
            self.layouts[path] = value

    def getxattr(self, path, name, position=0):
        with self.memory:
            layout = self.layouts.get(path)
            if layout is None and os.path.isdir(self.place(path)):
                layout = self.layouts.get("/")
        if name != LAYOUT or layout is None:
            raise fuse.FuseOSError(errno.ENODATA)
        return layout

    def listxattr(self, path):
        return []

    def inherit(self, path):
        parent = path.rpartition("/")[0] or "/"
        with self.memory:
            layout = self.layouts.get(parent)
            if os.path.isdir(self.place(path)):
                # That of the root stays with the root.
                if layout is not None and parent != "/":
                    self.layouts[path] = layout
            elif layout := layout or self.layouts.get("/"):
                n_osts = self.settings["n_osts"]
                self.layouts[path] = layout_bytes.of_file(layout, n_osts)

    def forget(self, path):
        with self.memory:
            self.layouts.pop(path, None)

    # Everything else goes to the directory beneath.

    def getattr(self, path, fh=None):
        try:
            found = os.lstat(self.place(path))
        except OSError as error:
            raise fuse.FuseOSError(error.errno) from None
        fields = {name: getattr(found, name) for name in _FIELDS}
        times = {name: getattr(found, f"{name}_ns") for name in _TIMES}
        return fields | times | {"st_blksize": BLOCK_NBYTES}

    def readdir(self, path, fh):
        return [".", "..", *os.listdir(self.place(path))]

    def open(self, path, flags):
        return os.open(self.place(path), flags & ~os.O_APPEND & ~os.O_DIRECT)

    def create(self, path, mode, fi=None):
        self.note("create", path)
        flags = os.O_CREAT | os.O_RDWR | os.O_TRUNC
        descriptor = os.open(self.place(path), flags, mode)
        self.inherit(path)
        return descriptor

    def mkdir(self, path, mode):
        self.note("mkdir", path)
        os.mkdir(self.place(path), mode)
        self.inherit(path)

    def rename(self, old, new, flags=0):
        self.note("rename", old, to=new)
        os.rename(self.place(old), self.place(new))  # noqa: TID251
        with self.memory:
            for path in [each for each in self.layouts if _is_at(each, old)]:
                self.layouts[new + path.removeprefix(old)] = self.layouts.pop(path)

    def unlink(self, path):
        os.unlink(self.place(path))
        self.forget(path)

    def rmdir(self, path):
        os.rmdir(self.place(path))
        self.forget(path)

    def read(self, path, size, offset, fh):
        return os.pread(fh, size, offset)

    def write(self, path, data, offset, fh):
        return os.pwrite(fh, data, offset)

    def truncate(self, path, length, fh=None):
        os.truncate(self.place(path), length)

    def release(self, path, fh):
        os.close(fh)

    def fsync(self, path, datasync, fh):
        os.fsync(fh)  # noqa: TID251 (what is asked of it)

    def fsyncdir(self, path, datasync, fh):
        pass

    def opendir(self, path):
        return 0

    def link(self, target, source):
        os.link(self.place(source), self.place(target))

    def chmod(self, path, mode):
        os.chmod(self.place(path), mode)

    def utimens(self, path, times=None):
        os.utime(self.place(path), ns=times)

    def statfs(self, path):
        room = os.statvfs(self.place(path))
        return {name: getattr(room, name) for name in _ROOM}


def _is_at(path, top):
    return path == top or path.startswith(top + "/")


def main():
    """Serve until the mount is gone."""
    root, point, log = sys.argv[1:]
    fuse.FUSE(
        LustreLike(root, log),
        point,
        foreground=True,
        nothreads=False,
        fsname="10.0.0.1@tcp:/scratch",
        subtype="lustre",
        attr_timeout=0,
        entry_timeout=0,
        negative_timeout=0,
    )


if __name__ == "__main__":
    main()

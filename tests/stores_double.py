"""A store in memory, which counts what it is asked and can be damaged by tests."""

import errno
import hashlib
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

from mpickpt.errors import StorageError
from mpickpt.storage import remote_path
from mpickpt.storage.stores import opening
from mpickpt.storage.stores.store import StoredFile

URL = "double://bucket"


def memory_store(monkeypatch):
    """Return a new store that is found under `URL` until the test ends."""
    store = MemoryStore(URL)

    def open_store(url):
        if url == URL or url.startswith(f"{URL}/"):
            return StoreBelow(store, url.removeprefix(URL).lstrip("/"))
        return opening.open_store(url)

    monkeypatch.setattr(remote_path, "open_store", open_store)
    return store


class MemoryStore:
    """Keeps files in a dict; as `Store`, but that nothing is durable.

    `asked` counts the calls by name, `largest_read` is the most that one has wanted,
    `most_at_once` the most calls that were under way. `latency_s` delays each call, and
    `refuse` is an errno with which all of them fail.
    """

    def __init__(self, url):
        self.url = url
        self.files = {}
        self.modified_s = {}
        self.asked = Counter()
        self.largest_read = 0
        self.most_at_once = 0
        self.latency_s = 0.0
        self.refuse = None
        self.deleted = []
        self._lock = threading.Lock()
        self._under_way = 0

    def list(self, prefix=""):
        with _Call(self, "list", prefix):
            found = [name for name in sorted(self.files) if name.startswith(prefix)]
        yield from map(self._stored, found)

    def directories(self, prefix=""):
        start = f"{prefix.rstrip('/')}/" if prefix else ""
        with _Call(self, "directories", prefix):
            below = [n[len(start) :] for n in self.files if n.startswith(start)]
        return sorted({start + n.partition("/")[0] for n in below if "/" in n})

    def stat(self, name):
        with _Call(self, "stat", name):
            return self._stored(name) if name in self.files else None

    def read(self, name, offset=0, nbytes=None):
        with _Call(self, "read", name):
            content = self._content(name)
            stop = len(content) if nbytes is None else offset + nbytes
            return content[offset:stop]

    def read_into(self, name, view, offset=0):
        with _Call(self, "read_into", name):
            self.largest_read = max(self.largest_read, len(view))
            found = self._content(name)[offset : offset + len(view)]
            view[: len(found)] = found
            return len(found)

    def put(self, name, content):
        with _Call(self, "put", name):
            self.files[name] = bytes(content)
            self.modified_s[name] = time.time()

    def put_new(self, name, content):
        with _Call(self, "put_new", name), self._lock:
            if name in self.files:
                return False
            self.files[name] = bytes(content)
            self.modified_s[name] = time.time()
            return True

    def upload(
        self, name, source, *, nbytes, sha256, pace=None, cancelled=None, progress=None
    ):
        content = Path(source).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (nbytes, sha256)
        self.put(name, content)

    def delete(self, names):
        with _Call(self, "delete", ""):
            for name in names:
                self.deleted.append(name)
                self.files.pop(name, None)

    def abort_leftovers(self, prefix="", older_than_s=0.0):
        with _Call(self, "abort_leftovers", prefix):
            return 0

    def check_conditions(self):
        return True

    def copy_in(self, directory, name):
        """Take all files below a directory, under a name."""
        for path in sorted(Path(directory).rglob("*")):
            if path.is_file():
                relative = path.relative_to(directory).as_posix()
                self.files[f"{name}/{relative}"] = path.read_bytes()

    def flip(self, name, offset):
        """Change one bit of a file."""
        content = bytearray(self.files[name])
        content[offset] ^= 1
        self.files[name] = bytes(content)

    def _content(self, name):
        if name not in self.files:
            url = f"{self.url}/{name}"
            message = f"cannot read {url}: there is no such object"
            raise StorageError(message, errno=errno.ENOENT, path=url)
        return self.files[name]

    def _stored(self, name):
        return StoredFile(
            name=name,
            nbytes=len(self.files[name]),
            modified_s=self.modified_s.get(name, 0.0),
        )


class StoreBelow:
    """What of a store lies below a directory, as a store."""

    def __init__(self, whole, directory):
        self._whole = whole
        self._prefix = f"{directory}/" if directory else ""
        self.url = f"{whole.url}/{directory}".rstrip("/")

    def __getattr__(self, name):
        call = getattr(self._whole, name)
        prefix = self._prefix
        return lambda first="", *rest, **named: call(prefix + first, *rest, **named)

    def list(self, prefix=""):
        for found in self._whole.list(self._prefix + prefix):
            yield replace(found, name=found.name.removeprefix(self._prefix))

    def directories(self, prefix=""):
        found = self._whole.directories(self._prefix + prefix)
        return [name.removeprefix(self._prefix) for name in found]

    def stat(self, name):
        found = self._whole.stat(self._prefix + name)
        return found and replace(found, name=name)

    def delete(self, names):
        self._whole.delete([self._prefix + name for name in names])

    def check_conditions(self):
        return self._whole.check_conditions()


class _Call:
    """One request, for its whole time."""

    def __init__(self, store, kind, name):
        self._store = store
        self._kind = kind
        self._name = name

    def __enter__(self):
        store = self._store
        with store._lock:
            store.asked[self._kind] += 1
            store._under_way += 1
            store.most_at_once = max(store.most_at_once, store._under_way)
        time.sleep(store.latency_s)
        if store.refuse is not None:
            self.__exit__()
            url = f"{store.url}/{self._name}"
            message = f"cannot {self._kind} {url}: refused"
            raise StorageError(message, errno=store.refuse, path=url)

    def __exit__(self, *_):
        with self._store._lock:
            self._store._under_way -= 1

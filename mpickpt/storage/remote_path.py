"""Names places in stores, as `pathlib` does in file systems; asks no store."""

import os
from dataclasses import dataclass
from pathlib import Path

from mpickpt.storage.stores.names import checked_name, is_name
from mpickpt.storage.stores.opening import local_path, open_store, scheme_of
from mpickpt.storage.stores.store import Store


@dataclass(frozen=True, slots=True, init=False, order=True)
class RemotePath:
    """A file or directory in a store, by its URL.

    Parameters
    ----------
    url : str
        scheme://bucket-or-host/path; a "/" at the end is dropped.

    Raises
    ------
    ValueError
        If it has no scheme, an empty component, "." or "..".

    Examples
    --------
    >>> run = RemotePath("s3://bucket/run/")
    >>> str(run / "step-0000000001" / "manifest.json")
    's3://bucket/run/step-0000000001/manifest.json'
    >>> (run / "step-0000000001").parent == run
    True
    """

    url: str

    def __init__(self, url: str) -> None:
        scheme, separator, rest = url.partition("://")
        root, slash, path = rest.rstrip("/").partition("/")
        if not separator or not scheme_of(url):
            raise ValueError(f"not the URL of a store: {url!r}")
        if slash and not is_name(path):
            raise ValueError(f"not the URL of a place in a store: {url!r}")
        whole = f"{scheme.lower()}://{root}{slash}{path}"
        object.__setattr__(self, "url", whole)

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(f"{self.url}/{checked_name(name)}")

    @property
    def name(self) -> str:
        """The last component; empty for the root of the store."""
        return self._components()[1]

    @property
    def parent(self) -> "RemotePath":
        """The directory it is in; a root is its own."""
        return RemotePath(self._components()[0])

    @property
    def store(self) -> Store:
        """The store whose names are relative to this path.

        A file is `path.parent.store.read(path.name)`. Stores share their connections,
        so this costs nothing.
        """
        return open_store(self.url)

    def _components(self) -> tuple[str, str]:
        scheme, separator, rest = self.url.partition("://")
        directory, slash, name = rest.rpartition("/")
        if not slash or (not directory and scheme):
            return self.url, ""
        return f"{scheme}{separator}{directory}", name


def parse_place(place: "str | os.PathLike[str] | RemotePath") -> Path | RemotePath:
    """Return what a person typed, or passed, as a path or as a place in a store.

    Parameters
    ----------
    place : str, path-like or RemotePath
        scheme://... is a store, file:///x the path /x, all else a path.

    Raises
    ------
    ValueError
        If it is a URL of no store, or one that went through `pathlib`.
    """
    if isinstance(place, RemotePath):
        return place
    text = os.fspath(place)
    if scheme_of(text) in ("", "file"):
        return local_path(text)
    if not text.partition("://")[2].strip("/"):
        raise ValueError(f"{text!r} names no bucket; expected one as s3://bucket/run")
    return RemotePath(text)

"""Opens the store of a URL; imports the client that it takes, and no other."""

import os
import re
from pathlib import Path
from urllib.parse import unquote

from mpickpt.storage.stores.store import Store, StoreOptions

_SCHEME = re.compile("([a-zA-Z][a-zA-Z0-9+.-]*)://")
_COLLAPSED = re.compile("[a-zA-Z][a-zA-Z0-9+.-]+:")
_DEFAULT = StoreOptions()


def open_store(place: object, options: StoreOptions = _DEFAULT) -> Store:
    """Return the store at a URL or a path; nothing is asked of it yet.

    Parameters
    ----------
    place : str, path-like or RemotePath
        s3:// (boto3), gs:// (google-cloud-storage), file:// and paths (a directory), or
        what fsspec knows by another name, if its package is installed.
    options : StoreOptions, optional
        How it is talked to.

    Raises
    ------
    StorageError
        Its client library is not installed; the text says how to install it.
    ValueError
        It is no URL of a store.
    """
    text = os.fspath(place) if isinstance(place, os.PathLike) else str(place)
    scheme = scheme_of(text)
    if scheme in ("", "file"):
        from mpickpt.storage.stores.directory_store import DirectoryStore

        return DirectoryStore(local_path(text), options)
    if scheme == "s3":
        from mpickpt.storage.stores.s3_store import S3Store

        return S3Store(text, options)
    if scheme in ("gs", "gcs"):
        from mpickpt.storage.stores.gcs_store import GcsStore

        return GcsStore(text, options)
    from mpickpt.storage.stores.fsspec_store import FsspecStore

    return FsspecStore(text, options)


def scheme_of(text: str) -> str:
    """Return the scheme of a URL in lower case; empty for a path.

    Raises
    ------
    ValueError
        If it is a chained URL of fsspec, or a URL that went through `pathlib`.
    """
    match = _SCHEME.match(text)
    if match:
        return match[1].lower()
    if "://" in text and "::" in text.partition("://")[0]:
        raise ValueError(f"{text!r}: chained URLs are not supported")
    first = text.partition("/")[0]
    if _COLLAPSED.fullmatch(first) and not Path(first).exists():
        raise ValueError(
            f"{text!r} looks like a URL that became a Path: give it as a string, "
            f"{first}//..."
        )
    return ""


def local_path(text: str) -> Path:
    """Return the path that a path, or a URL file:///..., names."""
    match = _SCHEME.match(text)
    if match is None:
        return Path(text)
    host, slash, path = text[match.end() :].partition("/")
    if host not in ("", "localhost") or not slash:
        raise ValueError(f"{text!r}: expected file:///absolute/path")
    return Path(unquote(f"/{path}"))

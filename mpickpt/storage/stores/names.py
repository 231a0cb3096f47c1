"""Checks names in stores, and builds those that stores use for themselves."""

import secrets

from mpickpt.format.naming import CONTROL_DIRECTORY

PARTS_DIRECTORY = f"{CONTROL_DIRECTORY}-parts"

_PROBE = f"{CONTROL_DIRECTORY}/probe-"


def checked_name(name: str) -> str:
    """Return a name if it is one of a file in a store.

    Raises
    ------
    ValueError
        If it is empty, absolute, has an empty component, "." or "..", or a NUL.
    """
    if not is_name(name):
        raise ValueError(f"not the name of a file in a store: {name!r}")
    return name


def is_name(name: str) -> bool:
    """Tell whether a name is one of a file in a store; see `checked_name`."""
    return "\0" not in name and {"", ".", ".."}.isdisjoint(name.split("/"))


def directory_prefix(name: str) -> str:
    """Return what the names of all in a directory begin with."""
    trimmed = name.strip("/")
    return f"{checked_name(trimmed)}/" if trimmed else ""


def split_bucket_url(url: str, scheme: str) -> tuple[str, str, str]:
    """Return the bucket of a URL, what names there begin with, and the URL as told.

    Raises
    ------
    ValueError
        If it names no bucket, or its path is none of a directory.
    """
    bucket, _, path = url.partition("://")[2].partition("/")
    if not bucket:
        raise ValueError(f"{url!r} names no bucket: {scheme}://BUCKET/PREFIX")
    prefix = directory_prefix(path)
    return bucket, prefix, f"{scheme}://{bucket}/{prefix}".rstrip("/")


def probe_name() -> str:
    """Return the name of a file that shows what a store can do."""
    return f"{_PROBE}{secrets.token_hex(8)}"


def parts_prefix(name: str, sha256: str, part_nbytes: int) -> str:
    """Return what the names of the parts of an unfinished upload begin with.

    They lie beside the file, so that they go when all of its directory goes. The digest
    and the size tell those of another file and of another division.
    """
    directory, slash, basename = name.rpartition("/")
    return (
        f"{directory}{slash}{PARTS_DIRECTORY}/{basename}/{sha256[:16]}-{part_nbytes}/"
    )


def is_of_parts(name: str) -> bool:
    """Tell whether a directory holds parts of unfinished uploads."""
    return PARTS_DIRECTORY in name.split("/")


def owner_of_part(name: str) -> str | None:
    """Return the file that a name of `parts_prefix` is for; None for all others."""
    components = name.split("/")
    if PARTS_DIRECTORY not in components[:-2]:
        return None
    at = components.index(PARTS_DIRECTORY)
    return "/".join([*components[:at], components[at + 1]])

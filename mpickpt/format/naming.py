"""Builds and parses every name on disk and every key; touches nothing.

A *key* is how a path in the state tree is written: in the manifest, on the command
line, and as the name of a dataset in a shard. Names that the library reserves for
itself begin with "%" and a lower-case letter, which no escaped text does.
"""

import re
from dataclasses import dataclass
from functools import lru_cache

MANIFEST_NAME = "manifest.json"
TMP_SUFFIX = ".tmp"
MANIFEST_TMP_NAME = MANIFEST_NAME + TMP_SUFFIX
CONTROL_DIRECTORY = ".mpickpt"
HALT_PATH = f"{CONTROL_DIRECTORY}/halt"
PINS_DIRECTORY = f"{CONTROL_DIRECTORY}/pins"
METRICS_DIRECTORY = f"{CONTROL_DIRECTORY}/metrics"
ATTEMPTS_DIRECTORY = f"{CONTROL_DIRECTORY}/attempts"
REJECTIONS_DIRECTORY = f"{CONTROL_DIRECTORY}/rejected"
LEASE_DIRECTORY = f"{CONTROL_DIRECTORY}/lease"

LIBRARY_GROUP = "%mpickpt"
INDEX_DATASET = f"{LIBRARY_GROUP}/index"
TABLE_DATASET = f"{LIBRARY_GROUP}/table"

RANKS_PER_DIRECTORY = 1000

Path = tuple[str | int, ...]

_ROOT = "%root"
_EMPTY = "%empty"
_ID8 = "([0-9a-f]{8})"
_STEP = "step-([0-9]{10}|[1-9][0-9]{10,18})"
_RANK = "([0-9]{5}|[1-9][0-9]{5,17})"
_STEP_DIRECTORY = re.compile(_STEP)
_REJECTED_DIRECTORY = re.compile(rf"{_STEP}\.rejected-{_ID8}")
# A save has one temporary for each shard; of several copiers each has one of its own.
_SHARD = re.compile(
    rf"rank{_RANK}-{_ID8}\.h5((?:\.[0-9a-f]{{8}})?{re.escape(TMP_SUFFIX)})?"
)
_RECEIPTS = re.compile(rf"receipts-{_ID8}\.json")
_LAYOUT = re.compile(r"layout-([0-9a-f]{16})\.h5")
_MARK = re.compile("mark-([0-9a-f]{32})")
_COPY_MARK = re.compile(rf"copying-{_ID8}\.json")
_SUBDIRECTORY = re.compile("ranks([0-9]{5}|[1-9][0-9]{5,14})")
_LEASE = re.compile(r"([0-9]{10}|[1-9][0-9]{10,})\.json")
_TEMPORARY = re.compile(rf"(.+)\.{_ID8}{re.escape(TMP_SUFFIX)}")

_LIKE_INT = re.compile("-?[0-9]+")
_CANONICAL_INT = re.compile("0|-?[1-9][0-9]*")
_UNSAFE = re.compile("[%/\x00-\x1f\x7f\ud800-\udfff]")
_ESCAPE = re.compile(b"%([0-9A-Fa-f]{2})")


@dataclass(frozen=True, slots=True)
class ShardName:
    """What the name of a shard says.

    Parameters
    ----------
    rank : int
        Rank that wrote it.
    id8 : str
        First 8 hex digits of the id of the save.
    is_temporary : bool
        Whether it still has the suffix of a file that is being written.
    """

    rank: int
    id8: str
    is_temporary: bool = False


def step_directory_name(step: int) -> str:
    """Return the name of the directory that holds the checkpoint of a step."""
    return f"step-{step:010d}"


def parse_step_directory(name: str) -> int | None:
    """Return the step of a name that `step_directory_name` builds, else None."""
    match = _STEP_DIRECTORY.fullmatch(name)
    return int(match[1]) if match else None


def rejected_directory_name(step: int, id8: str) -> str:
    """Return the name under which a checkpoint is set aside."""
    return f"{step_directory_name(step)}.rejected-{id8}"


def parse_rejected_directory(name: str) -> tuple[int, str] | None:
    """Return step and id of a name that `rejected_directory_name` builds."""
    match = _REJECTED_DIRECTORY.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


def shard_path(rank: int, world_size: int, save_id: str) -> str:
    """Return the path of a rank's shard, relative to the checkpoint.

    Parameters
    ----------
    rank, world_size : int
        Above 1,000 ranks each 1,000 of them share a sub-directory.
    save_id : str
        Id of the save; its first 8 hex digits are used.
    """
    name = f"rank{rank:05d}-{save_id[:8]}.h5"
    if world_size <= RANKS_PER_DIRECTORY:
        return name
    return f"{_subdirectory(rank // RANKS_PER_DIRECTORY)}/{name}"


def parse_shard_path(relative: str) -> ShardName | None:
    """Return what a path that `shard_path` builds says, else None."""
    directory, slash, basename = relative.rpartition("/")
    name = parse_shard_name(basename)
    if name is None or name.is_temporary:
        return None
    if slash and directory != _subdirectory(name.rank // RANKS_PER_DIRECTORY):
        return None
    return name


def parse_shard_name(basename: str) -> ShardName | None:
    """Return what the name of a shard says, or of one being written, else None."""
    match = _SHARD.fullmatch(basename)
    if not match:
        return None
    return ShardName(int(match[1]), match[2], is_temporary=match[3] is not None)


def shard_subdirectories(world_size: int) -> list[str]:
    """Return the sub-directories that the shards of a world lie in, if any."""
    if world_size <= RANKS_PER_DIRECTORY:
        return []
    return [_subdirectory(n) for n in range(-(-world_size // RANKS_PER_DIRECTORY))]


def parse_shard_subdirectory(name: str) -> int | None:
    """Return the number of a name of `shard_subdirectories`, else None."""
    match = _SUBDIRECTORY.fullmatch(name)
    return int(match[1]) if match else None


def receipts_name(save_id: str) -> str:
    """Return the name of the file that holds the timings of a save."""
    return f"receipts-{save_id[:8]}.json"


def parse_receipts_name(name: str) -> str | None:
    """Return the id of a name that `receipts_name` builds, else None."""
    match = _RECEIPTS.fullmatch(name)
    return match[1] if match else None


def layout_name(sha256: str) -> str:
    """Return the name of the layout file that has this digest."""
    return f"layout-{sha256[:16]}.h5"


def parse_layout_name(name: str) -> str | None:
    """Return the 16 hex digits of a name that `layout_name` builds, else None."""
    match = _LAYOUT.fullmatch(name)
    return match[1] if match else None


def mark_name(save_id: str) -> str:
    """Return the name of the file that tells a directory from all others."""
    return f"mark-{save_id}"


def parse_mark_name(name: str) -> str | None:
    """Return the id of a name that `mark_name` builds, else None."""
    match = _MARK.fullmatch(name)
    return match[1] if match else None


def copy_mark_name(save_id: str) -> str:
    """Return the name of the file that stands where a checkpoint is copied to."""
    return f"copying-{save_id[:8]}.json"


def parse_copy_mark_name(name: str) -> str | None:
    """Return the id of a name that `copy_mark_name` builds, else None."""
    match = _COPY_MARK.fullmatch(name)
    return match[1] if match else None


def is_own_file(name: str) -> bool:
    """Tell whether a file in a checkpoint's directory is one that we may leave there.

    A save may, or a copy.

    Its manifest is not among them: what a manifest refers to is no rubbish.
    """
    stem = parse_temporary_name(name) or name.removesuffix(TMP_SUFFIX)
    parsers = (parse_layout_name, parse_receipts_name)
    return (
        (stem == MANIFEST_NAME and stem != name)
        or parse_shard_name(name) is not None
        or parse_mark_name(name) is not None
        or parse_copy_mark_name(name) is not None
        or any(parse(stem) is not None for parse in parsers)
    )


def document_name(directory_name: str) -> str:
    """Return the name of the control file about a checkpoint's directory."""
    return f"{directory_name}.json"


def parse_document_name(name: str) -> str | None:
    """Return the directory that a control file is about, else None."""
    directory_name = name.removesuffix(".json")
    is_one = name != directory_name and (
        parse_step_directory(directory_name) is not None
        or parse_rejected_directory(directory_name) is not None
    )
    return directory_name if is_one else None


def parse_control_name(name: str) -> str | None:
    """Return the directory that a control file, or a pin, is about, else None."""
    return parse_document_name(document_name(name.removesuffix(".json")))


def lease_name(generation: int) -> str:
    """Return the name of the lease that was the n-th to be taken in a run."""
    return f"{generation:010d}.json"


def parse_lease_name(name: str) -> int | None:
    """Return the generation of a name that `lease_name` builds, else None."""
    match = _LEASE.fullmatch(name)
    return int(match[1]) if match else None


def temporary_name(name: str, token: str) -> str:
    """Return the name under which one of several writers prepares a file."""
    return f"{name}.{token}{TMP_SUFFIX}"


def parse_temporary_name(name: str) -> str | None:
    """Return the name that a file of a `temporary_name` was to get, else None."""
    match = _TEMPORARY.fullmatch(name)
    return match[1] if match else None


def parse_temporary_token(name: str) -> str | None:
    """Return the token of a `temporary_name`, by which its writer is known."""
    match = _TEMPORARY.fullmatch(name)
    return match[2] if match else None


def piece_name(number: int) -> str:
    """Return the name of one box's dataset where a rank holds several of an array."""
    return f"%piece{number}"


def key_of(path: Path) -> str:
    """Return the key of a path in the state tree.

    Parameters
    ----------
    path : tuple of str or int
        Keys of the nested containers from the root; any text is legal.

    Returns
    -------
    str
        Escaped components joined by "/". An int is written in decimal, a text of
        the same look gets its first character escaped, so 1 and "1" differ.
    """
    return "/".join(map(escape_component, path)) if path else _ROOT


# The same components come back at every save of a run.
@lru_cache(maxsize=1 << 16)
def escape_component(component: str | int) -> str:
    """Return one component of a key; see `key_of`."""
    if isinstance(component, int):
        return format(component, "d")
    if not component:
        return _EMPTY
    if _LIKE_INT.fullmatch(component) or not component.strip("."):
        return _percent(component[0]) + component[1:]
    return _UNSAFE.sub(lambda match: _percent(match[0]), component)


def parse_key(key: str) -> Path:
    """Return the path of a key; the exact inverse of `key_of`.

    Raises
    ------
    ValueError
        If `key_of` would not have written this key for any path.
    """
    path = _path_of(key)
    if key_of(path) != key:
        raise ValueError(f"not a canonical key: {key!r}; did you mean {key_of(path)!r}")
    return path


def key_from_user(text: str) -> str:
    """Return the canonical key for what a person types.

    Outer slashes, lower-case escapes, needless ones and a bare "%" are accepted.

    Raises
    ------
    ValueError
        If a component is empty or an escape is not UTF-8.
    """
    trimmed = text.strip("/")
    if "" in trimmed.split("/"):
        raise ValueError(f"a component of the key {text!r} is empty")
    return key_of(_path_of(trimmed))


def _subdirectory(number: int) -> str:
    return f"ranks{number:05d}"


def _percent(character: str) -> str:
    encoded = character.encode("utf-8", "surrogatepass")
    return "".join(f"%{byte:02X}" for byte in encoded)


def _path_of(key: str) -> Path:
    return () if key == _ROOT else tuple(map(_unescaped, key.split("/")))


def _unescaped(text: str) -> str | int:
    if text == _EMPTY:
        return ""
    if _CANONICAL_INT.fullmatch(text):
        return int(text)
    raw = text.encode("utf-8", "surrogatepass")
    plain = _ESCAPE.sub(lambda match: bytes.fromhex(match[1].decode()), raw)
    return plain.decode("utf-8", "surrogatepass")

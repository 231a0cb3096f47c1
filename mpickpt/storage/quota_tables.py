"""Reads what the tools of file systems print of quotas; pure, knows no files.

What cannot be read is None, never a guess.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import unquote

_KIB = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What is used, and what may be, of bytes or of files.

    Attributes
    ----------
    used : int or None
        None if that is not known for sure.
    soft, hard : int or None
        Limits, 0 where there is none, None where that is not known.
    is_late : bool
        Whether the soft limit has been passed for longer than the grace period, so
        that it is as hard as the hard one.
    """

    used: int | None
    soft: int | None
    hard: int | None
    is_late: bool = False

    @property
    def is_known(self) -> bool:
        """Whether it tells what is left."""
        return None not in (self.used, self.soft, self.hard)

    @property
    def limit(self) -> int | None:
        """What may not be passed; None where there is no limit."""
        limits = [self.hard, self.soft] if self.is_late else [self.hard]
        return min((limit for limit in limits if limit), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a table of quotas.

    Attributes
    ----------
    kind : str
        "user", "group" or "project"; "" if the table does not say.
    name : str
        Of the user, group or project, or its number.
    space, files : Use
        Of bytes, and of files.
    fileset : str
        Part of the file system, as GPFS calls it; "" for all of it.
    """

    kind: str
    name: str
    space: Use
    files: Use
    fileset: str = ""


# Used, soft, hard and grace, in kibibytes and in files: print_quota() of Lustre's lfs.c
# and showquotas() of quota-tools' quota.c. The file system stands before or on a line
# of its own; "*" marks what is passed, "[]" what lfs has not from all servers.
_COUNT = r"(\[?\d+k?\]?|-)"
_ROW = re.compile(
    rf"(?:^|\s){_COUNT}\**\s+{_COUNT}\s+{_COUNT}\s+(\S+)"
    rf"\s+{_COUNT}\**\s+{_COUNT}\s+{_COUNT}\s+(\S+)\s*$"
)
_HEADING = re.compile(r"Disk quotas for (\w+) (.*) \((?:uid|gid) (\d+)\):")


def parse_lfs_quota(text: str) -> Row | None:
    """Return what `lfs quota -q -u USER DIRECTORY` tells, None if nothing.

    Notes
    -----
    Grace is "-" below the soft limit, "6d23h59m" while it runs and "none" when it is
    over (diff2str() of lfs.c).
    """
    for line in text.splitlines():
        if match := _ROW.search(line):
            space, files = _uses(match, is_late=lambda grace: grace == "none")
            return Row(kind="", name="", space=space, files=files)
    return None


def parse_quota(text: str, now_s: float) -> dict[tuple[str, int], Row]:
    """Return what `quota -ugvwp -f DIRECTORY` tells, by kind and number.

    Parameters
    ----------
    text : str
        What it prints.
    now_s : float
        The time: with `-p`, grace is the time when it ends, 0 if it does not run.
    """
    rows: dict[tuple[str, int], Row] = {}
    heading = None
    for line in text.splitlines():
        heading = _HEADING.match(line) or heading
        if heading and (match := _ROW.search(line)):
            kind, name, number = heading.groups()
            space, files = _uses(
                match, is_late=lambda end: end.isdecimal() and 0 < int(end) <= now_s
            )
            row = Row(kind=kind, name=name, space=space, files=files)
            rows[kind, int(number)] = row
    return rows


def parse_mmlsquota(text: str) -> list[Row]:
    """Return what `mmlsquota -Y` of GPFS tells.

    Notes
    -----
    Fields have names in a line of their own, which versions order differently; ":" in a
    value is "%3A". Sizes are kibibytes. Grace is "none" where it does not run, "6 days"
    or "expired" (mmlsquota and mmrepquota, IBM Storage Scale). What is in doubt, given
    to nodes and perhaps not used, is not counted as used: it may be ours.
    """
    return [
        Row(
            kind=_GPFS_KINDS.get(fields.get("quotatype", ""), ""),
            name=fields.get("name", ""),
            space=_gpfs_use(fields, "block", _KIB),
            files=_gpfs_use(fields, "files", 1),
            fileset=fields.get("filesetname", ""),
        )
        for fields in _colon_rows(text)
    ]


_GPFS_KINDS = {"USR": "user", "GRP": "group", "FILESET": "project"}


def parse_fileset(text: str) -> str | None:
    """Return the fileset that `mmlsattr -L DIRECTORY` names, None if none."""
    match = re.search(r"^fileset name:[ \t]*(\S+)[ \t]*$", text, re.MULTILINE)
    return match[1] if match else None


def parse_qgroups(text: str) -> list[tuple[str, int, int | None, int, int | None]]:
    """Return what `btrfs qgroup show -re --raw` tells.

    Returns
    -------
    list of tuple
        Name of the group; bytes it refers to and their limit; bytes that are its own
        alone and their limit. None where there is no limit.
    """
    found = re.findall(
        r"^\s*(\d+/\d+)\s+(\d+)\s+(\d+)\s+(\d+|none)\s+(\d+|none)\b", text, re.MULTILINE
    )
    return [
        (name, int(rfer), _limit(max_rfer), int(excl), _limit(max_excl))
        for name, rfer, excl, max_rfer, max_excl in found
    ]


def _limit(text: str) -> int | None:
    return None if text == "none" else int(text)


def _uses(match: re.Match[str], *, is_late: Callable[[str], bool]) -> tuple[Use, Use]:
    used, soft, hard, grace, files, soft_files, hard_files, files_grace = match.groups()
    return (
        Use(
            used=_count(used, _KIB),
            soft=_count(soft, _KIB),
            hard=_count(hard, _KIB),
            is_late=is_late(grace),
        ),
        Use(
            used=_count(files, 1),
            soft=_count(soft_files, 1),
            hard=_count(hard_files, 1),
            is_late=is_late(files_grace),
        ),
    )


def _count(text: str, unit: int) -> int | None:
    digits = text.removesuffix("k")
    return int(digits) * unit if digits.isdecimal() else None


def _gpfs_use(fields: Mapping[str, str], what: str, unit: int) -> Use:
    return Use(
        used=_count(fields.get(f"{what}usage", "").rstrip("*"), unit),
        soft=_count(fields.get(f"{what}quota", ""), unit),
        hard=_count(fields.get(f"{what}limit", ""), unit),
        is_late=fields.get(f"{what}grace", "") == "expired",
    )


def _colon_rows(text: str) -> Iterator[dict[str, str]]:
    names: list[str] = []
    for line in text.splitlines():
        values = [unquote(value) for value in line.split(":")]
        if len(values) > 2 and values[2] == "HEADER":
            names = [name.lower() for name in values]
        elif names and values[0] == names[0]:
            yield dict(zip(names, values, strict=False))

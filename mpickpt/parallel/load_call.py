"""The arguments of one load."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from mpickpt.errors import CheckpointError, WorldSizeMismatchError
from mpickpt.planning.wants import Rules
from mpickpt.storage.places import Place, PlaceLike, absolute

VERIFY = ("sha256", "crc32", "none")


def load_call(
    path: PlaceLike,
    *,
    like: Any = None,
    expected_world_size: int | None = None,
    reshard: bool = False,
    verify: str | None = None,
    only: Sequence[str] | None = None,
    rename: Mapping[str, str] | None = None,
    missing: str = "error",
    unexpected: str = "error",
    cast: bool = False,
) -> "LoadCall":
    """Return the arguments of one load; see `load_sharded`.

    What is wrong on one rank is not raised here, where the others would wait for it,
    but by `LoadCall.check`, on all ranks.
    """
    directory: Place = Path(os.sep)
    patterns, renames, unusable = None, {}, None
    try:
        directory = absolute(path)
        patterns = None if only is None else _patterns(only)
        renames = _renames(rename)
    except (TypeError, ValueError, CheckpointError) as error:
        unusable = error
    return LoadCall(
        directory=directory,
        like=like,
        expected_world_size=expected_world_size,
        reshard=reshard,
        verify=verify or os.environ.get("MPICKPT_VERIFY") or "sha256",
        only=patterns,
        rename=renames,
        missing=missing,
        unexpected=unexpected,
        cast=cast,
        unusable=unusable,
    )


def _patterns(only: Any) -> tuple[str, ...]:
    patterns = (only,) if isinstance(only, str) else tuple(only)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"only is {only!r}; expected patterns as in ['model/*']")
    return patterns


def _renames(rename: Any) -> dict[str, str]:
    renames = dict(rename or {})
    if not all(isinstance(key, str) for pair in renames.items() for key in pair):
        raise TypeError(f"rename is {rename!r}; expected {{'old key': 'new key'}}")
    return renames


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCall:
    """The arguments of one load."""

    directory: Place
    like: Any
    expected_world_size: int | None
    reshard: bool
    verify: str
    only: tuple[str, ...] | None
    rename: dict[str, str]
    missing: str
    unexpected: str
    cast: bool
    unusable: Exception | None = None

    def check(self) -> None:
        """Raise unless the arguments are among those that are known."""
        if self.unusable is not None:
            raise self.unusable
        for name, known in (
            ("verify", VERIFY),
            ("missing", ("error", "keep")),
            ("unexpected", ("error", "ignore")),
        ):
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"{name} is {value!r}; expected one of {known}")

    @property
    def verifies_all(self) -> bool:
        """Whether every byte of the checkpoint is verified."""
        return self.verify != "none" and self.only is None

    def require_world_size(self, saved: int, current: int) -> None:
        """Raise unless the ranks that saved are as many as is asked for.

        Parameters
        ----------
        saved, current : int
            Number of ranks that saved, and that load.
        """
        expected = self.expected_world_size
        if expected is not None and saved != expected:
            raise WorldSizeMismatchError(
                f"{self.directory} was saved by {saved} ranks; "
                f"expected_world_size is {expected}",
                saved=saved,
                current=current,
            )
        if saved != current and not self.reshard:
            raise WorldSizeMismatchError(
                f"{self.directory} was saved by {saved} ranks, but {current} load it; "
                "start as many, or pass reshard=True to redistribute",
                saved=saved,
                current=current,
            )

    def packed(self) -> bytes:
        """Return what must be the same on all ranks."""
        same = (self.reshard, self.verify, self.rename, self.expected_world_size)
        text = repr((str(self.directory), *same))
        return sha256(text.encode("utf-8", "surrogatepass")).digest()

    def rules(self) -> Rules:
        """Return the ways out that were chosen."""
        only = self.only

        @cache
        def selected(key: str) -> bool:
            return only is None or any(_fits(key, pattern) for pattern in only)

        return Rules(selected, self.missing == "keep", self.cast)


def _fits(key: str, pattern: str) -> bool:
    return fnmatchcase(key, pattern) or key.startswith(pattern.rstrip("/") + "/")

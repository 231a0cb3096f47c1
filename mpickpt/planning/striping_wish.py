"""Says how a user wants shards to be striped over Lustre; pure."""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from mpickpt.planning.stripe_layout import (
    ALL_OSTS,
    StripeComponent,
    StripeLayout,
    plain_layout,
    size_text,
)
from mpickpt.planning.units import parse_nbytes

# lfs-setstripe(1): a multiple of 64 KiB, below 4 GiB; lustre_user.h:
# LOV_MAX_STRIPE_COUNT, LOV_MAXPOOLNAME.
SIZE_UNIT = 64 << 10
DEFAULT_SIZE = 4 << 20

_SIZE_LIMIT = 4 << 30
_MOST_COUNT = 2000
_MOST_POOL_LETTERS = 15


@dataclass(frozen=True, slots=True)
class Striping:
    """How the shards of a checkpoint shall be striped over a Lustre file system.

    Parameters
    ----------
    count : int
        Over how many OSTs (storage targets) each shard goes; -1 is all of them.
    size : int
        Bytes of a stripe: a multiple of 64 KiB, below 4 GiB.
    pool : str or None
        Name of the group of OSTs to stay in, without that of the file system. None
        leaves it to the site.
    """

    count: int
    size: int = DEFAULT_SIZE
    pool: str | None = None
    reason: str = field(default="", compare=False, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        _check_count(self.count)
        _check_size(self.size)
        _check_pool(self.pool)

    @property
    def layout(self) -> StripeLayout:
        """The layout that new files shall have."""
        return plain_layout(self.count, self.size, self.pool or "")

    def __str__(self) -> str:
        return str(self.layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressiveStriping:
    """Stripes that become more as a shard becomes longer.

    Parameters
    ----------
    components : tuple of StripeComponent
        Ranges from 0 to the end of the file, without a gap.
    pool : str or None
        As in `Striping`.
    """

    components: tuple[StripeComponent, ...]
    pool: str | None = None
    reason: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        end: int | None = 0
        for part in self.components:
            _check_count(part.count)
            _check_size(part.size)
            if part.start != end or (part.end or 0) % SIZE_UNIT:
                raise ValueError(
                    f"component {part!r} does not go from {end} to a multiple of "
                    f"{size_text(SIZE_UNIT)}"
                )
            end = part.end
        if end is not None:
            raise ValueError("the last component must go to the end of the file")
        _check_pool(self.pool)

    @property
    def layout(self) -> StripeLayout:
        """The layout that new files shall have."""
        return StripeLayout(
            components=self.components, pool=self.pool or "", is_composite=True
        )

    def __str__(self) -> str:
        return str(self.layout)


Wish: TypeAlias = Literal["site", "auto"] | Striping | ProgressiveStriping


def difference(
    layout: StripeLayout | None, wanted: Striping | ProgressiveStriping
) -> str | None:
    """Return what a layout has instead of what was wanted, or None if nothing."""
    if layout is None or not layout.is_known:
        return "the layout cannot be read back"
    pool_differs = wanted.pool is not None and layout.pool != wanted.pool
    if layout.components != wanted.layout.components or pool_differs:
        return f"the layout is {layout}"
    return None


def parse_striping(value: object) -> Wish:
    """Return what a user says of striping.

    Parameters
    ----------
    value : Striping, ProgressiveStriping or str
        As text "site", "auto", "pfl", or as in "count=4,size=16MiB,pool=flash", of
        which only the count is needed.

    Raises
    ------
    TypeError, ValueError
        Anything else; the text says what is understood.
    """
    if isinstance(value, Striping | ProgressiveStriping):
        return value
    if not isinstance(value, str):
        raise TypeError(
            f"striping is a {type(value).__name__}; expected a str or a Striping"
        )
    match value.strip():
        case "site":
            return "site"
        case "auto":
            return "auto"
        case "pfl":
            return PROGRESSIVE
        case text:
            return _parse_settings(text)


def _parse_settings(text: str) -> Striping:
    pairs = [setting.partition("=") for setting in text.split(",")]
    settings = {name.strip(): setting.strip() for name, _, setting in pairs}
    try:
        count = int(settings.pop("count"))
        size = settings.pop("size", None)
        pool = settings.pop("pool", None)
        if settings or len(pairs) != sum(s is not None for s in (count, size, pool)):
            raise KeyError
    except (KeyError, ValueError):
        raise ValueError(
            f"striping {text!r} is not 'site', 'auto', 'pfl' or as in "
            "'count=4,size=16MiB,pool=flash'"
        ) from None
    return Striping(count, DEFAULT_SIZE if size is None else parse_nbytes(size), pool)


def _check_count(count: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"stripe count {count!r} is not an int")
    if count != ALL_OSTS and not 1 <= count <= _MOST_COUNT:
        raise ValueError(
            f"stripe count {count} is neither -1 (all) nor from 1 to {_MOST_COUNT}"
        )


def _check_size(size: int) -> None:
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"stripe size {size!r} is not an int")
    if not 0 < size < _SIZE_LIMIT or size % SIZE_UNIT:
        raise ValueError(
            f"stripe size {size} is not a multiple of {size_text(SIZE_UNIT)} below "
            f"{size_text(_SIZE_LIMIT)}"
        )


def _check_pool(pool: str | None) -> None:
    if pool is None:
        return
    if not isinstance(pool, str):
        raise TypeError(f"pool {pool!r} is not a str")
    letters = pool.replace("_", "").replace("-", "")
    is_name = letters.isascii() and letters.isalnum() and not pool.startswith("-")
    if not is_name or len(pool) > _MOST_POOL_LETTERS:
        raise ValueError(
            f"pool {pool!r} is not a name of up to {_MOST_POOL_LETTERS} letters, "
            "digits, '-' and '_'"
        )


# As Amazon FSx for Lustre (1 up to 1 GiB, then 5) and DKRZ (1, from 1 GiB on 4, from
# 4 GiB on 8) have it.
PROGRESSIVE = ProgressiveStriping(
    components=(
        StripeComponent(end=1 << 30, count=1, size=4 << 20),
        StripeComponent(start=1 << 30, count=4, size=16 << 20),
    ),
    reason="progressive layout",
)

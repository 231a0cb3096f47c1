"""Says how a file lies over the storage targets of Lustre, as was read from it; pure.

A file is cut into stripes of equal size, which go in turn to `count` objects, each on
an OST (object storage target) of its own. A composite layout, of which the progressive
one is the usual kind, has another count and size in each range of the file.
"""

from dataclasses import dataclass

ALL_OSTS = -1

_PREFIXES = "KMGTP"


@dataclass(frozen=True, slots=True, kw_only=True)
class StripeComponent:
    """A range of a file with stripes of one kind.

    Attributes
    ----------
    start, end : int, int or None
        Range in bytes; None is the end of the file, however far.
    count : int
        Over how many OSTs; -1 is all. 0 for what lies on a metadata server.
    size : int
        Bytes of a stripe.
    """

    start: int = 0
    end: int | None = None
    count: int
    size: int

    def __str__(self) -> str:
        if self.count == 0:
            return "the metadata server"
        noun = "stripe" if self.count == 1 else "stripes"
        count = "all OSTs in" if self.count == ALL_OSTS else str(self.count)
        return f"{count} {noun} of {size_text(self.size)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StripeLayout:
    """The layout of a file, or of the files to be made in a directory.

    Attributes
    ----------
    components : tuple of StripeComponent
        One for a plain layout; none if the layout cannot be read.
    pool : str
        Name of the group of OSTs it is limited to; "" is none.
    is_composite : bool
        Whether other ranges of the file are striped otherwise.
    """

    components: tuple[StripeComponent, ...]
    pool: str = ""
    is_composite: bool = False

    @property
    def is_known(self) -> bool:
        """Whether the layout could be read."""
        return bool(self.components)

    @property
    def size(self) -> int | None:
        """Bytes of the largest stripes; None if that is not known."""
        return max((part.size for part in self.components if part.count), default=None)

    @property
    def count(self) -> int | None:
        """Over how many OSTs a large file goes, -1 for all; None if not known."""
        return self.count_of(None)

    def count_of(self, nbytes: int | None) -> int | None:
        """Return over how many OSTs a file of so many bytes goes; None: without end."""
        counts = [
            part.count
            for part in self.components
            if nbytes is None or part.start < max(nbytes, 1)
        ]
        return ALL_OSTS if ALL_OSTS in counts else max(counts, default=None)

    def __str__(self) -> str:
        if not self.is_known:
            return "a composite layout that only `lfs` can read"
        pool = f" in pool {self.pool}" if self.pool else ""
        if not self.is_composite:
            return f"{self.components[0]}{pool}"
        ranges = [
            f"{part} from {size_text(part.start)}" if part.start else str(part)
            for part in self.components
        ]
        return f"{', '.join(ranges)}{pool}"


def plain_layout(count: int, size: int, pool: str = "") -> StripeLayout:
    """Return a layout that is the same for the whole file."""
    return StripeLayout(
        components=(StripeComponent(count=count, size=size),), pool=pool
    )


def size_text(nbytes: int) -> str:
    """Return a number of bytes, exactly: "4 MiB", "65 KiB", "100 bytes"."""
    number, prefix = scaled(nbytes)
    return f"{number} {prefix}iB" if prefix else f"{number} bytes"


def scaled(nbytes: int) -> tuple[int, str]:
    """Return a number of bytes as a number and the largest prefix that is exact."""
    number, prefix = nbytes, ""
    for larger in _PREFIXES:
        if not number or number % 1024:
            break
        number, prefix = number // 1024, larger
    return number, prefix

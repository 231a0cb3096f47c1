"""Says how to install a client library that is not there; touches nothing."""

import contextlib
import errno
from collections.abc import Iterator

from mpickpt.errors import StorageError


@contextlib.contextmanager
def needs(library: str, place: str) -> Iterator[None]:
    """Raise every ImportError of the body as a StorageError that names the extra.

    Parameters
    ----------
    library : str
        What the body imports.
    place : str
        URL for which it is needed.
    """
    try:
        yield
    except ImportError as error:
        message = (
            f"cannot open {place}: {library} is not installed ({error}); "
            "pip install mpickpt[objectstore]"
        )
        raise StorageError(message, errno=errno.ENOPKG, path=place) from error

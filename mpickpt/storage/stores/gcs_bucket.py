"""Calls Google Cloud Storage by its client and says what its errors mean.

Credentials come in the client's usual ways (GOOGLE_APPLICATION_CREDENTIALS, what
`gcloud auth application-default login` keeps, the service account of a node);
STORAGE_EMULATOR_HOST names an emulator.
"""

import errno
import os
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

from mpickpt.errors import StorageError
from mpickpt.storage.stores.failures import (
    CHECK_CREDENTIALS,
    Cancellation,
    Failure,
    Retries,
)
from mpickpt.storage.stores.missing_client import needs
from mpickpt.storage.stores.store import StoreOptions

T = TypeVar("T")

Blob = Any

PRECONDITION_FAILED = 412

_BAD_RANGE = 416
_TRANSIENT = frozenset((408, 429, 500, 502, 503, 504))
_NO_ANSWER = "the store does not answer: look at the network and proxies"


class GcsBucket:
    """One bucket, and a client for it that threads share.

    Parameters
    ----------
    name : str
        Of the bucket.
    options : StoreOptions
        How the store is talked to.

    Attributes
    ----------
    how : dict
        Arguments that every call of the client takes: time-outs, and no tries of its
        own, since `Retries` tries again the same way for every kind of store.
    """

    def __init__(self, name: str, options: StoreOptions) -> None:
        self.name = name
        self.honours_conditions: bool | None = None
        timeout_s = (options.connect_timeout_s, options.read_timeout_s)
        self.how: dict[str, Any] = {"timeout": timeout_s, "retry": None}
        self._lock = threading.Lock()
        self._bucket: Any = None
        self._retries = Retries(explain=explain, for_s=options.retry_for_s)

    def run(
        self,
        action: str,
        place: str,
        call: Callable[[Any], T],
        *,
        cancelled: Cancellation | None = None,
    ) -> T:
        """Return what `call` returns for the client's bucket."""

        def call_connected() -> T:
            return call(self._connected())

        try:
            with needs("google-cloud-storage", place):
                return self._retries.run(
                    action, place, call_connected, cancelled=cancelled
                )
        except StorageError as error:
            if error.errno == errno.EACCES:
                # Whoever renews the file of credentials is noticed by the next call.
                with self._lock:
                    self._bucket = None
            raise

    def _connected(self) -> Any:
        with self._lock:
            if self._bucket is None:
                from google.cloud import storage

                # No project is asked for: it matters for making buckets alone.
                self._bucket = storage.Client(project=None).bucket(self.name)
            return self._bucket


def gcs_bucket_of(name: str, options: StoreOptions) -> GcsBucket:
    """Return the bucket of a name; the same one while the environment stays."""
    names = (name for name in os.environ if name.startswith(("GOOGLE_", "STORAGE_")))
    environment = tuple((name, os.environ[name]) for name in sorted(names))
    return _bucket_of(name, options, environment)


def explain(error: Exception) -> Failure:
    """Say what an error of the client means."""
    import google.auth.exceptions as auth
    import requests.exceptions as http
    from google.cloud.storage.exceptions import DataCorruption
    from urllib3.exceptions import HTTPError
    from urllib3.exceptions import TimeoutError as SilenceError

    if isinstance(error, DataCorruption):
        # What was stored is not what was sent, or what came is not what is stored.
        return Failure(errno=errno.EIO, reason=str(error), is_transient=True)
    code = status_of(error)
    if code:
        return _explain_answer(code, str(error))
    if isinstance(error, auth.TransportError | HTTPError | OSError):
        is_late = isinstance(error, http.Timeout | SilenceError | TimeoutError)
        return Failure(
            errno=errno.ETIMEDOUT if is_late else errno.EIO,
            reason=f"{type(error).__name__}: {error}",
            advice=_NO_ANSWER,
            is_transient=True,
        )
    if isinstance(error, auth.GoogleAuthError):
        reason = f"{type(error).__name__}: {error}"
        return Failure(errno=errno.EACCES, reason=reason, advice=CHECK_CREDENTIALS)
    if isinstance(error, ImportError):
        raise error
    # The client stumbles over an answer whose connection ended within the headers.
    is_cut = isinstance(error, AttributeError | LookupError | TypeError | ValueError)
    reason = f"{type(error).__name__}: {error}"
    return Failure(errno=errno.EIO, reason=reason, is_transient=is_cut)


def status_of(error: BaseException | None) -> int:
    """Return the HTTP status that the store answered with; 0 if it did not."""
    status = getattr(error, "code", None)
    if status is None:
        status = getattr(getattr(error, "response", None), "status_code", None)
    return int(status) if isinstance(status, int) else 0


def is_past_the_end(error: StorageError) -> bool:
    """Tell whether a range was asked for that begins after a file's last byte."""
    return status_of(error.__cause__) == _BAD_RANGE


def _explain_answer(code: int, said: str) -> Failure:
    if code in (401, 403):
        return Failure(errno=errno.EACCES, reason=said, advice=CHECK_CREDENTIALS)
    if code == 404:
        advice = "is the bucket there?" if "bucket" in said.lower() else ""
        return Failure(errno=errno.ENOENT, reason=said, advice=advice)
    if code == PRECONDITION_FAILED:
        return Failure(errno=errno.EEXIST, reason=said)
    return Failure(errno=errno.EIO, reason=said, is_transient=code in _TRANSIENT)


@lru_cache(maxsize=32)
def _bucket_of(
    name: str, options: StoreOptions, environment: tuple[tuple[str, str], ...]
) -> GcsBucket:
    return GcsBucket(name, options)

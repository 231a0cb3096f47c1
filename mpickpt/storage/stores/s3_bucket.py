"""Calls S3 by boto3; with `s3_errors` the only module that imports it.

Credentials, region, profile and endpoint come in boto3's usual ways (AWS_PROFILE,
AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ~/.aws, the roles of a node, ...).
"""

import errno
import io
import os
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

from mpickpt.errors import StorageError
from mpickpt.storage.stores.failures import Cancellation, Retries
from mpickpt.storage.stores.missing_client import needs
from mpickpt.storage.stores.parts import Sending
from mpickpt.storage.stores.s3_errors import explain
from mpickpt.storage.stores.store import StoreOptions

T = TypeVar("T")

Client = Any


class Bucket:
    """One bucket, and a client for it that threads share.

    Parameters
    ----------
    name : str
        Of the bucket.
    options : StoreOptions
        How the store is talked to.
    """

    def __init__(self, name: str, options: StoreOptions) -> None:
        self.name = name
        self.honours_conditions: bool | None = None
        self._options = options
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._retries = Retries(explain=explain, for_s=options.retry_for_s)

    def run(
        self,
        action: str,
        place: str,
        call: Callable[[Client], T],
        *,
        cancelled: Cancellation | None = None,
        so_far: Callable[[], int] = lambda: 0,
    ) -> T:
        """Return what `call` returns for the client; it is tried as `Retries` does."""
        with needs("boto3", place):
            client = self._connected()
        try:
            return self._retries.run(
                action,
                place,
                lambda: call(client),
                cancelled=cancelled,
                so_far=so_far,
            )
        except StorageError as error:
            if error.errno == errno.EACCES:
                # Whoever renews the file of credentials is noticed by the next call.
                with self._lock:
                    self._client = None
            raise

    def _connected(self) -> Client:
        with self._lock:
            if self._client is None:
                self._client = _new_client(self._options)
            return self._client


def bucket_of(name: str, options: StoreOptions) -> Bucket:
    """Return the bucket of a name; the same one while the environment stays."""
    names = sorted(name for name in os.environ if name.startswith("AWS_"))
    environment = tuple((name, os.environ[name]) for name in names)
    return _bucket_of(name, options, environment)


class PacedBody(io.BytesIO):
    """The body of a request that asks for the bandwidth of what is being sent."""

    def __init__(self, content: bytes, sending: Sending) -> None:
        super().__init__(content)
        self._sending = sending
        self._is_sent = False

    def begin(self) -> None:
        """Count what is read from now on: before, boto3 may read it for a digest."""
        self._is_sent = True

    def read(self, size: int | None = -1, /) -> bytes:
        """Return bytes that may be sent."""
        content = super().read(size)
        if self._is_sent:
            self._sending.take(len(content))
        return content


@lru_cache(maxsize=32)
def _bucket_of(
    name: str, options: StoreOptions, environment: tuple[tuple[str, str], ...]
) -> Bucket:
    return Bucket(name, options)


def _new_client(options: StoreOptions) -> Client:
    import boto3
    from botocore.config import Config

    config = Config(
        connect_timeout=options.connect_timeout_s,
        read_timeout=options.read_timeout_s,
        max_pool_connections=32,
        tcp_keepalive=True,
        # `Retries` tries again, the same way for every kind of store.
        retries={"mode": "standard", "total_max_attempts": 1},
        # Each request bears the SHA-256 that it should; more would need two passes.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    client = boto3.session.Session().client("s3", config=config)
    client.meta.events.register("before-send.s3", _begin_body)
    return client


def _begin_body(request: Any, **_: Any) -> None:
    if isinstance(request.body, PacedBody):
        request.body.begin()

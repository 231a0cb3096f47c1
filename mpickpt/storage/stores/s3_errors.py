"""Says what the errors of S3 and of boto3 mean; touches nothing."""

import errno
from typing import Any

from mpickpt.errors import StorageError
from mpickpt.storage.stores.failures import CHECK_CREDENTIALS, Failure

PRECONDITION_FAILED = "PreconditionFailed"

# A request was damaged or cut on its way: sent again, it may arrive. AWS answers 400.
_TRANSIENT_CODES = frozenset(
    {
        "BadDigest",
        "ConditionalRequestConflict",
        "IncompleteBody",
        "InternalError",
        "OperationAborted",
        "RequestTimeout",
        "RequestTimeoutException",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "TooManyRequestsException",
        "XAmzContentChecksumMismatch",
        "XAmzContentSHA256Mismatch",
    }
)
_TRANSIENT_STATUSES = frozenset((408, 429, 500, 502, 503, 504, 509, 520, 522, 524))
_EXPIRED_CODES = frozenset({"ExpiredToken", "ExpiredTokenException", "RequestExpired"})
_REFUSED_CODES = frozenset(
    {
        "AccessDenied",
        "InvalidAccessKeyId",
        "InvalidToken",
        "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
    }
)
_ABSENT_CODES = frozenset({"NoSuchKey", "NoSuchBucket", "NoSuchUpload", "404"})
_FULL_CODES = frozenset({"XMinioStorageFull", "InsufficientStorage", "507"})
_QUOTA_CODES = frozenset({"QuotaExceeded", "XMinioAdminBucketQuotaExceeded"})
_NO_ANSWER = "the store does not answer: look at the network, proxies and the endpoint"


def explain(error: Exception) -> Failure:
    """Say what an error of boto3 means."""
    from botocore import exceptions as known
    from urllib3.exceptions import HTTPError
    from urllib3.exceptions import TimeoutError as SilenceError

    if isinstance(error, known.ClientError):
        return _explain_answer(error)
    no_credentials = (
        known.NoCredentialsError,
        known.PartialCredentialsError,
        known.CredentialRetrievalError,
        known.TokenRetrievalError,
        known.ProfileNotFound,
        known.SSOError,
    )
    if isinstance(error, no_credentials):
        return Failure(
            errno=errno.EACCES, reason=str(error), advice="see the credentials of boto3"
        )
    timeouts = (
        known.ConnectTimeoutError,
        known.ReadTimeoutError,
        SilenceError,
        TimeoutError,
    )
    if isinstance(error, timeouts):
        reason = f"no answer in time ({type(error).__name__})"
        return _silence(errno.ETIMEDOUT, reason)
    connection = (
        known.HTTPClientError,
        known.IncompleteReadError,
        known.ResponseStreamingError,
        HTTPError,
        OSError,
    )
    if isinstance(error, connection):
        return _silence(errno.EIO, str(error))
    return Failure(errno=errno.EIO, reason=f"{type(error).__name__}: {error}")


def checked_answer(answer: Any, *names: str) -> Any:
    """Return an answer if it has what every answer of its kind has.

    Raises
    ------
    ConnectionError
        The connection ended within the headers: Python takes those that came for all.
    """
    for name in names:
        if name not in answer:
            raise ConnectionError(f"the answer was cut: it tells no {name}")
    return answer


def is_final(error: StorageError) -> bool:
    """Tell whether a store has refused a request, and not for who asks."""
    cause = error.__cause__
    if not code_of(cause) or not isinstance(cause, Exception):
        return False
    return error.errno in (errno.EIO, errno.ENOENT) and not explain(cause).is_transient


def code_of(error: BaseException | None) -> str:
    """Return the code that S3 gave for an error; empty if it was none of S3's."""
    response = getattr(error, "response", None)
    if not isinstance(response, dict):
        return ""
    return str(response.get("Error", {}).get("Code", ""))


def _explain_answer(error: Any) -> Failure:
    code = code_of(error)
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    said = error.response.get("Error", {}).get("Message", "")
    reason = f"{status} {code}: {said}"
    if code in _EXPIRED_CODES:
        advice = "the credentials have expired: renew them"
        return Failure(errno=errno.EACCES, reason=reason, advice=advice)
    if code in _QUOTA_CODES:
        return Failure(errno=errno.EDQUOT, reason=reason)
    if code in _FULL_CODES:
        return Failure(errno=errno.ENOSPC, reason=reason)
    if code in _REFUSED_CODES or status in (401, 403):
        return Failure(errno=errno.EACCES, reason=reason, advice=CHECK_CREDENTIALS)
    if code in _ABSENT_CODES:
        advice = "make the bucket first" if code == "NoSuchBucket" else ""
        return Failure(errno=errno.ENOENT, reason=reason, advice=advice)
    if code == PRECONDITION_FAILED or status == 412:
        return Failure(errno=errno.EEXIST, reason=reason)
    return Failure(
        errno=errno.EIO,
        reason=reason,
        is_transient=code in _TRANSIENT_CODES or status in _TRANSIENT_STATUSES,
    )


def _silence(number: int, reason: str) -> Failure:
    return Failure(errno=number, reason=reason, advice=_NO_ANSWER, is_transient=True)

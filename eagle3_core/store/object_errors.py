"""What an error of the object store means: whether to try again, and one clear line for the user.

Source of the codes: the S3 API reference, "List of error codes"; other servers use a subset of them.
"""

from __future__ import annotations

import re

from eagle3_core.errors import (
    HostError,
    LostObjectError,
    ObjectAccessError,
    ObjectStoreError,
    StoreError,
)
from eagle3_core.sections import ObjectStoreConfig

WRONG_CREDENTIALS = {
    "ExpiredToken", "InvalidAccessKeyId", "InvalidSecurity", "InvalidToken", "RequestExpired",
    "SignatureDoesNotMatch", "TokenRefreshRequired", "UnrecognizedClientException",
}  # fmt: skip
NO_CREDENTIALS = {
    "CredentialRetrievalError", "NoCredentialsError", "PartialCredentialsError", "ProfileNotFound",
    "SSOTokenLoadError", "TokenRetrievalError", "UnauthorizedSSOTokenError",
}  # fmt: skip
WRONG_REGION = {
    "301", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "InvalidRegionError",
    "NoRegionError", "PermanentRedirect",
}  # fmt: skip
NO_PERMISSION = {"401", "403", "AccessDenied", "AccountProblem", "AllAccessDisabled", "InvalidPayer"}
NO_SPACE = {"507", "InsufficientStorage", "QuotaExceeded", "StorageFull", "XMinioStorageFull"}
MISSING_OBJECT = {"404", "NoSuchKey", "NoSuchVersion"}
MUTE_REFUSALS = {"301", "400", "403"}
PAST_THE_END = {"416", "InvalidRange"}
MISSING_UPLOAD = {"NoSuchUpload"}
CONDITION_FAILED = {"412", "PreconditionFailed"}
NOT_SUPPORTED = {"501", "NotImplemented"}
TRANSIENT_CODES = {
    "409", "429", "BadDigest", "ConditionalRequestConflict", "IncompleteBody", "InternalError",
    "OperationAborted", "RequestTimeout", "ServiceUnavailable", "SlowDown", "Throttling",
    "ThrottlingException", "TooManyRequests", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch",
}  # fmt: skip
TRANSIENT_TYPES = {
    "ClientError", "ConnectionError", "FSTimeoutError", "HTTPClientError", "IncompleteRead",
    "ResponseParserError", "ServerDisconnectedError", "TimeoutError",
}  # fmt: skip
"""Names of exception types of botocore, aiohttp and fsspec, and of their bases, that end a connection."""
CHECKED_ACTIONS = {"complete_multipart_upload", "create_multipart_upload", "put_object", "upload_part"}
CHECKSUM_WORDS = re.compile(r"checksum|trailer|digest|content-md5|sdk-checksum", re.IGNORECASE)
TAKE_LESS = {"sha256": "etag", "etag": "read_back"}
"""The next value of `object_store.checksum` that asks less of a server."""


def cause_of(error: BaseException) -> BaseException:
    """The error of botocore behind the `OSError` that s3fs makes of it."""
    cause = error.__cause__
    return cause if cause is not None and hasattr(cause, "response") else error


def error_code(error: BaseException) -> str:
    """The code that the server answered, or the name of the error's type."""
    response = getattr(cause_of(error), "response", None)
    return str(response["Error"].get("Code", "")) if response else type(error).__name__


def status_code(error: BaseException) -> int:
    """HTTP status of the answer; 0 where there was none."""
    response = getattr(cause_of(error), "response", None) or {}
    return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed in a moment."""
    if getattr(cause_of(error), "response", None) is not None:
        status = status_code(error)
        return error_code(error) in TRANSIENT_CODES or (status >= 500 and status not in (501, 507))
    if isinstance(error, ConnectionError):
        return True
    return any(base.__name__ in TRANSIENT_TYPES for base in type(error).__mro__)


def explain(
    error: BaseException, action: str, where: str, settings: ObjectStoreConfig
) -> StoreError | HostError:
    """One clear line for a request that failed for good.

    Args:
        error: what the client raised.
        action: what was tried, e.g. `put_object`.
        where: the object or bucket as a URL.
        settings: of the store; its server and checksum are named where they matter.
    """
    code, reason = error_code(error), _reason(error)
    server = settings.endpoint_url or "the endpoint of the environment"
    if code in NO_CREDENTIALS:
        return ObjectAccessError(
            f"there are no credentials for {where} ({reason})",
            remedy="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give the host a role",
        )
    if code in WRONG_CREDENTIALS:
        return ObjectAccessError(
            f"{server} does not accept the credentials for {where} ({reason})",
            remedy="check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, or the profile",
        )
    if code == "NoSuchBucket":
        return ObjectAccessError(
            f"the bucket of {where} does not exist at {server}",
            remedy="make it, or set `store` and object_store.endpoint_url right",
        )
    if code in WRONG_REGION:
        return ObjectAccessError(
            f"{where} cannot be reached in this region ({reason})", remedy="set object_store.region"
        )
    if code in NO_PERMISSION:
        return ObjectAccessError(
            f"{action} of {where} is not permitted ({reason})",
            remedy="the credentials need GetObject, PutObject, DeleteObject, AbortMultipartUpload, "
            "ListMultipartUploadParts, ListBucket and ListBucketMultipartUploads there",
        )
    if code == "RequestTimeTooSkewed":
        return ObjectAccessError(f"{server} finds this host's clock wrong", remedy="set the clock")
    if code in NO_SPACE:
        return ObjectStoreError(f"{server} has no space for {where} ({reason})", remedy="make room there")
    if code in MISSING_OBJECT:
        return LostObjectError(
            f"{where} is not in the bucket", remedy="run the stage that makes it again: it makes what is lost"
        )
    if code in PAST_THE_END:
        return LostObjectError(
            f"{where} is shorter than its manifest says", remedy="run the stage that makes it again"
        )
    if is_about_checksums(error, action, settings):
        return ObjectAccessError(
            f"{server} refuses the checksum of {where} ({code}: {reason})",
            remedy=f"set object_store.checksum to `{TAKE_LESS[settings.checksum]}`",
        )
    if status_code(error):
        return ObjectStoreError(
            f"{action} of {where} failed ({code}: {reason})",
            remedy="run it again; what is uploaded and proven is kept",
        )
    return _without_answer(error, action, where, server, settings)


def is_about_checksums(error: BaseException, action: str, settings: ObjectStoreConfig) -> bool:
    """Whether a server refused what proves an upload rather than the upload."""
    if settings.checksum not in TAKE_LESS or action not in CHECKED_ACTIONS:
        return False
    if error_code(error) in NOT_SUPPORTED:
        return True
    if error_code(error) in TRANSIENT_CODES:  # the server knows checksums and found other bytes
        return False
    return status_code(error) == 400 and bool(CHECKSUM_WORDS.search(f"{error_code(error)} {_reason(error)}"))


def _without_answer(
    error: BaseException, action: str, where: str, server: str, settings: ObjectStoreConfig
) -> StoreError | HostError:
    """The server could not be reached, or ended or lost the connection."""
    if isinstance(error, ImportError):
        return HostError(
            f"{where} needs s3fs, which this environment lacks ({error})", remedy="run `make setup`"
        )
    names = {base.__name__ for base in type(error).__mro__}
    # aiobotocore calls a connection that broke later an `EndpointConnectionError` too.
    below = {base.__name__ for base in type(getattr(error, "kwargs", {}).get("error")).__mro__}
    has_broken = "ClientOSError" in below and "ClientConnectorError" not in below
    unreachable = {"EndpointConnectionError", "ConnectTimeoutError", "InvalidEndpointConfigurationError"}
    if names & unreachable and not has_broken:
        return ObjectStoreError(
            f"{server} cannot be reached ({_reason(error)})",
            remedy="check object_store.endpoint_url or AWS_ENDPOINT_URL, the network and the proxy settings",
        )
    if names & {"ReadTimeoutError", "TimeoutError", "FSTimeoutError"}:
        return ObjectStoreError(
            f"{action} of {where} took longer than object_store.timeout_seconds = "
            f"{settings.timeout_seconds:g} allows, in each of {settings.attempts} attempts",
            remedy="run it again, or raise object_store.timeout_seconds",
        )
    reason = "the connection broke" if has_broken else f"{type(error).__name__}: {_reason(error)}"
    return ObjectStoreError(
        f"{action} of {where} failed ({reason}{f', in {settings.attempts} attempts' * is_transient(error)})",
        remedy="run it again; what is uploaded and proven is kept",
    )


def _reason(error: BaseException) -> str:
    response = getattr(cause_of(error), "response", None)
    text = str(response["Error"].get("Message") or "") if response else str(error)
    return " ".join(text.split())[:300] or error_code(error)

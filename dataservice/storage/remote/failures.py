"""What the clients of stores raise, as errors of ours: few kinds, and no secret in any text.

Invariants: FileNotFoundError for what is not there; StorageError for what may pass; any other
OSError for what will not. Texts are masked, and the client's own exception is not chained, as its
text would be printed with ours.
"""

from __future__ import annotations

import errno
import os

from dataservice.errors import StorageError
from dataservice.masking import mask_parts, mask_urls

_PASSING_STATUS = frozenset((408, 425, 429, 500, 502, 503, 504))
_PACKAGES = {
    "http": "aiohttp",
    "https": "aiohttp",
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
}
_GIVE_CREDENTIALS = "give credentials in the environment or in fsspec's config"
_LASTING = frozenset(
    (
        errno.EINVAL,
        errno.EACCES,
        errno.EPERM,
        errno.ENOSYS,
        errno.ENOTDIR,
        errno.ENAMETOOLONG,
        errno.EOPNOTSUPP,
    )
)


class LastingError(OSError):
    """Another attempt would fail the same way; `errno` says the kind, the text names no URL."""

    def __init__(self, text: str, code: int = errno.EINVAL) -> None:
        super().__init__(code, mask_urls(text))

    def __str__(self) -> str:
        return str(self.args[1])


def not_found(url: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), mask_urls(url))


def passing(url: str, text: str) -> StorageError:
    """Another attempt may succeed."""
    return StorageError(f"{url}: {text}")


def http_failure(url: str, status: int, reason: str) -> Exception:
    """The error for a status of 400 and more."""
    text = f"HTTP {status} {reason}".rstrip()
    if status in (404, 410):
        return not_found(url)
    if status in _PASSING_STATUS:
        return passing(url, text)
    if status in (401, 403):
        return LastingError(f"{text}: {_GIVE_CREDENTIALS}", errno.EACCES)
    return LastingError(text)


def translated(url: str, error: Exception) -> Exception:
    """What to raise, from None, for what a client raised over `url`."""
    text = mask_parts(f"{type(error).__name__}: {error}".removesuffix(": "), url)
    if isinstance(error, StorageError | LastingError):
        return error
    if isinstance(error, FileNotFoundError):
        return not_found(url)
    if isinstance(error, ImportError):
        package = _PACKAGES.get(url.partition("://")[0])
        return LastingError(f"{error}" + (f"; pip install {package}" if package else ""))
    if isinstance(error, PermissionError) or "CredentialsError" in type(error).__name__:
        return LastingError(f"{text}: {_GIVE_CREDENTIALS}", errno.EACCES)
    if isinstance(error, IsADirectoryError):
        return LastingError("is a folder", errno.EISDIR)
    if isinstance(error, OSError) and error.errno in _LASTING:
        return LastingError(text, error.errno)
    return passing(url, text)

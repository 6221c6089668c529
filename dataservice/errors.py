"""The one exception tree of the project.

    DataServiceError
    |-- ConfigError            a setting is wrong (also a ValueError)
    |   `-- AccessRefused      a certificate or a token is not taken
    |-- DataError              one record, member or picture is bad; carries where
    |   |-- RecordError        a record cannot be read
    |   |-- ArchiveError       a zip archive or member cannot be read
    |   `-- ImageError         a picture cannot be decoded
    |-- StaleIndexError        a shard changed after it was indexed
    |-- StorageError           a read failed in a way that may pass (retry elsewhere)
    |   |-- StorageTimeout     a read did not end within its deadline
    |   `-- PackMoved          another worker builds the pack now
    |-- WireError              bytes that are not a valid message or frame of ours
    |   `-- DamagedMessage     they changed on their way: asked for once more
    |-- ResumeRefused          a cursor cannot be continued exactly (also a ValueError)
    |-- SessionFenced          a newer run of the trainer reads this job
    |-- LeaseLost              a worker or stager was taken for dead and must register anew
    |-- JobHeld              another coordinator serves this job
    |-- HoleBudgetExceeded     more holes than the error policy allows
    |-- ServiceUnavailable     nobody answers; the cursor is intact
    `-- DeadlineExceeded       a wait ended at its deadline (also a TimeoutError)

User errors name the field, the value and the remedy. Data errors carry source, shard and sample.
"""

from __future__ import annotations

from dataservice.masking import mask_urls


class DataServiceError(Exception):
    """Base of every error the service or the client raises on purpose; its text has no secrets of
    URLs, so that it may be printed, logged and sent."""

    answered = False
    """Whether it came as the answer of a service, which therefore is there."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(mask_urls(arg) if isinstance(arg, str) else arg for arg in args))


class ConfigError(DataServiceError, ValueError):
    """A setting is wrong; the text names the field, its value and the remedy."""


class AccessRefused(ConfigError):
    """One end does not take the other's certificate or token; the text names the file and the
    remedy. It does not pass by itself."""


class DataError(DataServiceError):
    """One piece of data is bad; `where` says which, `reason` says why, for a person."""

    def __init__(
        self,
        reason: str,
        *,
        source: str = "",
        shard: str = "",
        sample: str = "",
        member: str = "",
    ) -> None:
        reason = mask_urls(reason)
        self.reason = reason
        self.source = source
        self.shard = shard
        self.sample = sample
        self.member = member
        super().__init__(reason)

    @property
    def where(self) -> str:
        named = (
            ("source", self.source),
            ("shard", self.shard),
            ("sample", self.sample),
            ("member", self.member),
        )
        return ", ".join(f"{name} {value}" for name, value in named if value)

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}" if self.where else self.reason


class RecordError(DataError):
    """A record cannot be read."""


class ArchiveError(DataError):
    """A zip archive or one of its members cannot be read."""


class ImageError(DataError):
    """A picture cannot be decoded."""


class StaleIndexError(DataServiceError):
    """A shard changed after it was indexed; the text names the shard and the remedy."""


class StorageError(DataServiceError):
    """A read failed in a way that may pass; it is retried, then tried by another worker."""


class StorageTimeout(StorageError):
    """A read did not end within its deadline."""


class PackMoved(StorageError):
    """Another worker builds the pack now; the coordinator says which."""


class WireError(DataServiceError):
    """Bytes that are not a valid message or frame of ours."""


class DamagedMessage(WireError):
    """A control message that is not what was sent, as far as can be told; it is sent once more."""


class ResumeRefused(DataServiceError, ValueError):
    """A cursor cannot be continued exactly; the text gives both values and the remedy."""


class SessionFenced(DataServiceError):
    """A newer run of the trainer reads this job; this client must stop."""


class LeaseLost(DataServiceError):
    """A worker or stager was silent for longer than its lease; it must register anew."""


class JobHeld(DataServiceError):
    """Another coordinator serves this job; the text names it."""


class HoleBudgetExceeded(DataServiceError):
    """More holes than the error policy allows; the text names the worst shard."""


class ServiceUnavailable(DataServiceError):
    """Nobody answers at the endpoint; the client's cursor is intact."""


class DeadlineExceeded(DataServiceError, TimeoutError):
    """A wait ended at its deadline; the text says who waited for what for how long."""

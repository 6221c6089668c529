"""Origins that are not files of this machine: S3, web servers, and all else that fsspec knows."""

from dataservice.storage.remote.backend import FsspecBackend

__all__ = ["FsspecBackend"]

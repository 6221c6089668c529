"""Pictures decoded in processes of their own, for packs whose pictures may have killed a worker.

Invariants: patches are those of the decoder in the worker, byte for byte; whatever a picture does
to the process that decodes it is a hole with a reason in words, and nothing else.
"""

from __future__ import annotations

from dataservice.pipeline.isolation.decoder import IsolatedDecoder, picture_memory

__all__ = ["IsolatedDecoder", "picture_memory"]

"""The trainer's side of the data service: an iterator of micro-batches, and what goes with it.

Importing it needs torch, numpy, grpcio, msgpack and zstandard, and never pulls in ray.
"""

from __future__ import annotations

from dataservice.rpc.security import ClientSecurity
from trainer_client.agreement import shared_run_id
from trainer_client.batch import MicroBatch, VisionInfo
from trainer_client.cost_terms import cost_terms
from trainer_client.device import normalize
from trainer_client.layout import ParallelLayout
from trainer_client.metrics import StreamStats
from trainer_client.stream import PackStream

__all__ = [
    "ClientSecurity",
    "MicroBatch",
    "PackStream",
    "ParallelLayout",
    "StreamStats",
    "VisionInfo",
    "cost_terms",
    "normalize",
    "shared_run_id",
]

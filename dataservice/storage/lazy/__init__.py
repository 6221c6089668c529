"""The lazy index: offsets before training, counts while it runs, the plan of the full index."""

from dataservice.storage.lazy.blocks import BlocksMissing, Key
from dataservice.storage.lazy.build import ScanProgress, ScanReport, scan_sources
from dataservice.storage.lazy.here import CountingHere, Outcome
from dataservice.storage.lazy.index import LazyIndex, check_lazy_plan

__all__ = [
    "BlocksMissing",
    "CountingHere",
    "Key",
    "LazyIndex",
    "Outcome",
    "ScanProgress",
    "ScanReport",
    "check_lazy_plan",
    "scan_sources",
]

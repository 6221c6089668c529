"""Copies of shards on a node's own disk: what to copy, what to drop, and copying it safely.

Invariants: a copy has its name only when it is complete, on disk and of the right size and CRC;
nothing but files that this package named is ever removed, and never an original; the jobs of a node
share one directory and its budget.
"""

from dataservice.storage.staging.area import StagingArea
from dataservice.storage.staging.budget import budget_warnings
from dataservice.storage.staging.copiers import Copiers
from dataservice.storage.staging.figures import Figures
from dataservice.storage.staging.folder import CacheFolder
from dataservice.storage.staging.needs import Need, Use, decide

__all__ = [
    "CacheFolder",
    "Copiers",
    "Figures",
    "Need",
    "StagingArea",
    "Use",
    "budget_warnings",
    "decide",
]

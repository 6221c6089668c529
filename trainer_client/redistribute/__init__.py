"""Balance without the service: ranks exchange the packs that each has read by itself.

`loader` is what a trainer sees, `rebalancer` makes its micro-batches, from `shares` of the sources,
a `placement` and an `exchange`, in the thread of `ahead`.
"""

from __future__ import annotations

from trainer_client.redistribute.loader import RebalancedLoader, RebalanceStats

__all__ = ["RebalanceStats", "RebalancedLoader"]

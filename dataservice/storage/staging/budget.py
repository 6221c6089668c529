"""What a staging budget cannot hold of an index, said before the first copy.

Invariants: files of image folders, each a shard of its own, are not looked at.
"""

from __future__ import annotations

from dataservice.masking import mask_urls
from dataservice.storage.manifest import Manifest


def budget_warnings(manifest: Manifest, budget_bytes: int | None) -> tuple[str, ...]:
    """For a person; none where every record file and archive fits the budget of a node, and where
    nothing is staged (None)."""
    if budget_bytes is None:
        return ()
    sizes = {
        shard.url: shard.unpacked_bytes or shard.size_bytes
        for source in manifest.sources
        for shard in source.shards
    }
    sizes |= {
        archive.url: archive.size_bytes for archive in manifest.archives if archive.url not in sizes
    }
    larger = {url: size for url, size in sizes.items() if size > budget_bytes}
    if not larger:
        return ()
    largest = max(larger, key=lambda url: (larger[url], url))
    warning = (
        f"staging.budget_bytes is {budget_bytes:,}: {len(larger):,} of {len(sizes):,} shards, "
        f"{sum(larger.values()):,} of {sum(sizes.values()):,} bytes, are larger than that and are "
        f"never staged, but always read from their origins; the largest is {mask_urls(largest)} "
        f"with {larger[largest]:,} bytes: raise staging.budget_bytes above that"
    )
    return (warning,)

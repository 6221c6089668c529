"""How the scan of a lazy index looks to a person, and what was counted of it so far.

Invariants: as in index_view.
"""

from __future__ import annotations

import atexit
from typing import Any

import orjson
import typer

from dataservice.cli.index_view import kinds_object, kinds_of, progress_bar, show_kinds
from dataservice.config import Config
from dataservice.config.folders import check_writable
from dataservice.indexing import LazyRejected, open_lazy_index, scan_lazy_index, write_lazy_rejected
from dataservice.storage.index_report import IndexProgress
from dataservice.storage.lazy import LazyIndex, ScanProgress, ScanReport


def scan_with_progress(config: Config) -> ScanReport:
    with progress_bar() as show:

        def tell(state: ScanProgress) -> None:
            show(
                IndexProgress(
                    done_bytes=state.done_bytes,
                    total_bytes=state.total_bytes,
                    num_samples=state.num_records,
                    num_rejected=0,
                    shard=state.file.rpartition("/")[2],
                )
            )

        try:
            return scan_lazy_index(config, tell)
        except OSError:
            check_writable("index_dir", config.index_dir)
            raise


def bring_up_to_date(config: Config) -> None:
    """Says so when something had to be read for it."""
    report = scan_with_progress(config)
    if report.files_read:
        typer.echo(
            f"lazy index: found the records of {report.files_read:,} files, "
            f"{report.files_reused:,} were up to date; {report.num_records:,} records, which are "
            "counted when they are needed",
            err=True,
        )


def open_lazy(config: Config) -> LazyIndex:
    """Counts what is asked for in this process, and is closed when that ends."""
    bring_up_to_date(config)
    index = open_lazy_index(config)
    atexit.register(index.close)
    return index


def show_scan(config: Config, *, as_json: bool = False) -> None:
    """`dataservice index` of a lazy index: the summary, to stdout."""
    report = scan_with_progress(config)
    if as_json:
        typer.echo(orjson.dumps(scan_object(report, write_lazy_rejected(config))))
        return
    for source in report.manifest.sources:
        records = sum(shard.num_rows for shard in source.shards)
        typer.echo(f"{source.name}: {records:,} records in {len(source.shards):,} files")
    typer.echo(
        f"in all {report.num_records:,} records, found in {report.files_read:,} files, "
        f"{report.files_reused:,} were up to date; lazy index {report.manifest.digest[:12]}"
    )
    typer.echo(
        "index: lazy counts no record now: tokens and picture sizes are found while training runs, "
        "ahead of the plan, and kept"
    )
    found = write_lazy_rejected(config)
    typer.echo(f"counted so far: {found.counted_blocks:,} of {found.all_blocks:,} blocks")
    if found.num_rejected:
        typer.echo(f"{found.num_rejected:,} records of them cannot be used ({found.path}):")
        show_kinds(found.path)


def scan_object(report: ScanReport, found: LazyRejected) -> dict[str, Any]:
    """For --json. `num_rejected` is of the blocks counted so far."""
    kinds = kinds_of(found.path) if found.num_rejected else []
    return {
        "index": "lazy",
        "digest": report.manifest.digest,
        "num_records": report.num_records,
        "num_rejected": found.num_rejected,
        "rejected_path": found.path if found.num_rejected else None,
        "rejected_by_reason": kinds_object(kinds),
        "files_read": report.files_read,
        "files_reused": report.files_reused,
        "counted_blocks": found.counted_blocks,
        "all_blocks": found.all_blocks,
        "sources": [
            {
                "name": source.name,
                "num_records": sum(shard.num_rows for shard in source.shards),
                "files": len(source.shards),
            }
            for source in report.manifest.sources
        ],
    }

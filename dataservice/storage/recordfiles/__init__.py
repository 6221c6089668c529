"""Record files of every kind: their records one after the other, and each by its place."""

from dataservice.storage.packed.unpacking import content_of, packing_of, unpacked
from dataservice.storage.recordfiles.places import read_record
from dataservice.storage.recordfiles.scan import Offsets, RecordScan, count_records, scan_offsets

__all__ = [
    "Offsets",
    "RecordScan",
    "content_of",
    "count_records",
    "packing_of",
    "read_record",
    "scan_offsets",
    "unpacked",
]

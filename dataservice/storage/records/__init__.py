"""Records as people write them, and what is read from them."""

from dataservice.storage.records.inline import MAX_INLINE_BYTES, decode_data_uri, is_data_uri
from dataservice.storage.records.model import (
    LAYOUTS,
    MAX_IMAGES,
    Record,
    Role,
    Size,
    Turn,
)
from dataservice.storage.records.reader import (
    RecordReader,
    inline_image,
    parse_record,
    reader_of,
)

__all__ = [
    "LAYOUTS",
    "MAX_IMAGES",
    "MAX_INLINE_BYTES",
    "Record",
    "RecordReader",
    "Role",
    "Size",
    "Turn",
    "decode_data_uri",
    "inline_image",
    "is_data_uri",
    "parse_record",
    "reader_of",
]

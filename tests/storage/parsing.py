"""Records of a test, written and read again."""

from __future__ import annotations

import json
from typing import Any

from dataservice.storage.records import Record, RecordReader, parse_record
from dataservice.storage.sources import RecordFormat


def parse(record: object, **options: Any) -> Record:
    line, fmt = json.dumps(record).encode(), RecordFormat(**options)
    read = RecordReader(fmt).read(line)
    assert read == parse_record(line, fmt)
    return read


def llava(*, question: str = "Hi.", **fields: object) -> dict[str, object]:
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": "A bus."}]
    return {"id": 7, "conversations": turns, **fields}


def pieces(record: Record) -> list[tuple[str, ...]]:
    return [turn.pieces for turn in record.turns]

"""Small data sets on disk for the tests of the index: record files, archives and pictures."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from dataservice.errors import RecordError
from dataservice.storage.counting import Counted
from dataservice.storage.records import Record

MARKUP = 7


class ByteCounter:
    """One token a byte of text, every second one with loss; an image's markup is 7 tokens."""

    def __init__(self, fingerprint: str = "bytes") -> None:
        self.fingerprint = fingerprint
        self.counted = 0

    def count_all(self, records: Sequence[Record]) -> list[Counted | RecordError]:
        return [self.count(record) for record in records]

    def count(self, record: Record) -> Counted:
        self.counted += 1
        tokens = 0
        positions = []
        for turn in record.turns:
            for number, piece in enumerate(turn.pieces):
                if number:
                    positions.append(tokens)
                    tokens += MARKUP
                tokens += len(piece.encode())
        return Counted(
            text_tokens=tokens,
            loss_tokens=tokens // 2,
            image_positions=tuple(positions),
            image_markup=MARKUP,
        )


def picture(width: int, height: int, file_format: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (width % 256, height % 256, 7)).save(file, file_format)
    return file.getvalue()


def llava(text: str, *images: str, **fields: Any) -> dict[str, Any]:
    turns = [{"from": "human", "value": "<image>" * len(images) + text}]
    answer = {"from": "gpt", "value": "Yes."}
    return {"image": list(images), "conversations": [*turns, answer], **fields}


def write_jsonl(path: Path, *records: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [r if isinstance(r, bytes) else json.dumps(r).encode() for r in records]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def write_zip(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name), data, compress_type=method)
    return path


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path

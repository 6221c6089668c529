"""Small data sets on disk for the tests of the index: JSONL lines, zips and folders of pictures."""

from __future__ import annotations

import io
import json
import re
import zipfile
from pathlib import Path
from typing import Any

from PIL import Image

from dataservice.storage.counting import Counted
from dataservice.storage.records import Record

PLACEHOLDER = b"<image>"


class ByteCounter:
    """One token a byte of text, every second one with loss; a placeholder is an image's markup."""

    def __init__(self, fingerprint: str = "bytes") -> None:
        self.fingerprint = fingerprint
        self.counted = 0

    def count(self, record: Record) -> Counted:
        self.counted += 1
        text = b"".join(turn.text.encode() for turn in record.turns)
        return Counted(
            text_tokens=len(text),
            loss_tokens=len(text) // 2,
            image_positions=tuple(found.start() for found in re.finditer(PLACEHOLDER, text)),
            image_markup=len(PLACEHOLDER),
        )


def picture(width: int, height: int, file_format: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (width % 256, height % 256, 7)).save(file, file_format)
    return file.getvalue()


def llava(text: str, *images: str) -> dict[str, Any]:
    turns = [{"from": "human", "value": "<image>" * len(images) + text}]
    return {"image": list(images), "conversations": [*turns, {"from": "gpt", "value": "Yes."}]}


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

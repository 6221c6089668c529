from __future__ import annotations

import io
import zipfile

import pytest
from PIL import Image

from dataservice.linting.kinds import kind_of


def png() -> bytes:
    stored = io.BytesIO()
    Image.new("RGB", (4, 4)).save(stored, "PNG")
    return stored.getvalue()


def archive() -> bytes:
    stored = io.BytesIO()
    with zipfile.ZipFile(stored, "w") as file:
        file.writestr("a.txt", "a")
    return stored.getvalue()


TAR = bytes(257) + b"ustar\x0000" + bytes(255)


@pytest.mark.parametrize(
    ("name", "data", "kind"),
    [
        ("a.png", png(), "image"),
        ("a.jpg", png(), "image"),
        ("a.jsonl", png(), "records"),
        ("a.zip", png(), "zip"),
        ("noname", png(), "image"),
        ("a.zip", archive(), "zip"),
        ("a.jpg", archive(), "image"),
        ("a.jpg", TAR, "image"),
        ("noname", archive(), "zip"),
        ("a.jsonl.zip", archive(), "records"),
        ("setup.exe", b"MZ" + bytes(1000) + archive(), "zip"),
        ("a.zip", b"cut", "zip"),
        ("a.zip", b"", "zip"),
        ("a.tar", TAR, "tar"),
        ("noname", TAR, "tar"),
        ("a.tar.gz", b"\x1f\x8b\x08", "tar"),
        ("a.jsonl", b"", "records"),
        ("a.JSONL.gz", b"\x1f\x8b\x08", "records"),
        ("a.json", b"not json", "records"),
        ("a.parquet", b"PAR1", "records"),
        ("noname", b"PAR1", "records"),
        ("noname", b"\xef\xbb\xbf\n {", "records"),
        ("a.jpg", b'{"error": "not found"}', "image"),
        ("a.jpg", b"<html>", "image"),
        ("a.png", b"", "image"),
        ("a.svg", b"<svg/>", "image"),
        ("noname", b"hello", "image"),
    ],
)
def test_by_name_then_by_content(name: str, data: bytes, kind: str) -> None:
    assert kind_of(name, lambda offset, size: data[offset : offset + size], len(data)) == kind

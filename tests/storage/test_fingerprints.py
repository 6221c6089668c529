from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dataservice.errors import ArchiveError
from dataservice.storage.backends import ObjectStat
from dataservice.storage.fingerprints import (
    ArchiveIdentity,
    RecordFileIdentity,
    identity_of,
    source_fingerprint,
)
from dataservice.storage.listing import FoundFile
from dataservice.storage.sources import RecordFormat, SourceFiles

FILES = SourceFiles(name="s", records=("/data/*.jsonl",))
RECORDS = [
    RecordFileIdentity(name="a.jsonl", size_bytes=10, crc32=1),
    RecordFileIdentity(name="b.jsonl", size_bytes=20, crc32=2),
]
ARCHIVES = [
    ArchiveIdentity(url="/data/in/a.zip", size_bytes=5, directory_crc32=7),
    ArchiveIdentity(url="/else/b.zip", size_bytes=6, directory_crc32=8),
]


def fingerprint(
    files: SourceFiles = FILES,
    root: str = "/data",
    records: Sequence[RecordFileIdentity] = RECORDS,
    archives: Sequence[ArchiveIdentity] = ARCHIVES,
) -> str:
    return source_fingerprint(files, root, records, archives)


def test_content_and_settings_count() -> None:
    changed = [
        fingerprint(dataclasses.replace(FILES, format=RecordFormat(data_uris=True))),
        fingerprint(dataclasses.replace(FILES, strip_prefix="x/")),
        fingerprint(dataclasses.replace(FILES, add_prefix="x/")),
        fingerprint(dataclasses.replace(FILES, take="first:3")),
        fingerprint(records=RECORDS[:1]),
        fingerprint(records=RECORDS[::-1]),
        fingerprint(records=[dataclasses.replace(RECORDS[0], crc32=3), RECORDS[1]]),
        fingerprint(records=[dataclasses.replace(RECORDS[0], name="c"), RECORDS[1]]),
        fingerprint(archives=ARCHIVES[::-1]),
        fingerprint(archives=[dataclasses.replace(ARCHIVES[0], directory_crc32=9), ARCHIVES[1]]),
    ]
    assert len({fingerprint(), *changed}) == len(changed) + 1


def test_places_and_names_of_the_source_do_not() -> None:
    moved = [
        dataclasses.replace(ARCHIVES[0], url="s3://b/copy/in/a.zip"),
        dataclasses.replace(ARCHIVES[1], url="/elsewhere/b.zip"),
    ]
    other = dataclasses.replace(FILES, name="t", records=("s3://b/copy/*",))
    assert fingerprint(other, root="s3://b/copy", archives=moved) == fingerprint()
    assert fingerprint(archives=[*ARCHIVES, ARCHIVES[0]]) == fingerprint()


def test_identities() -> None:
    stat = ObjectStat(size_bytes=5, mtime_ns=3)
    file = FoundFile(url="/data/a.zip", stat=stat)
    bad = identity_of(file, ArchiveError("bad"))
    assert bad == ArchiveIdentity(url="/data/a.zip", size_bytes=5, directory_crc32=0)
    folder = FoundFile(url="/data", stat=dataclasses.replace(stat, is_folder=True))
    assert identity_of(folder, None) is None

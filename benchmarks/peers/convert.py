"""The forms that some loaders need the corpus in; runs in the environment of the peers.

python -m peers.convert tars|mds MIXED_JSONL TARGET_DIR
"""

from __future__ import annotations

import io
import sys
import tarfile
from pathlib import Path

from peers.reading import Reader
from peers.work import Entry, read_entries

SHARDS = 8


def write_tars(entries: list[Entry], target: Path) -> None:
    """WebDataset tars, a sample's parts side by side, and what Energon wants beside them."""
    reader = Reader()
    for shard in range(SHARDS):
        part = entries[shard * len(entries) // SHARDS : (shard + 1) * len(entries) // SHARDS]
        with tarfile.open(target / f"shard-{shard:03}.tar", "w") as tar:
            for number, entry in enumerate(part):
                sample = reader.read(entry)
                parts = [("record", sample.record)]
                for i, (member, data) in enumerate(zip(entry.members, sample.images, strict=True)):
                    parts.append((f"{i}{Path(member).suffix.lower()}", data))
                for name, data in parts:
                    info = tarfile.TarInfo(f"{shard:03}{number:06}.{name}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))


def prepare_energon(target: Path) -> None:
    from megatron.energon.flavors import BaseWebdatasetFactory

    BaseWebdatasetFactory.prepare_dataset(
        target,
        sorted(path.name for path in target.glob("*.tar")),
        split_parts_ratio=[("train", 1.0), ("val", 0.0), ("test", 0.0)],
        shuffle_seed=None,
        workers=1,
    )
    definition = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
    (target / ".nv-meta" / "dataset.yaml").write_text(definition)


def write_mds(entries: list[Entry], target: Path) -> None:
    import msgpack

    from peers.mosaic import streaming

    reader = Reader()
    with streaming.MDSWriter(
        out=str(target), columns={"record": "bytes", "images": "bytes"}
    ) as out:
        for entry in entries:
            sample = reader.read(entry)
            out.write({"record": sample.record, "images": msgpack.packb(sample.images)})


def main() -> None:
    form, mixed, target = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    entries = read_entries(mixed)
    if form == "tars":
        target.mkdir()
        write_tars(entries, target)
        prepare_energon(target)
    else:
        write_mds(entries, target)


if __name__ == "__main__":
    main()

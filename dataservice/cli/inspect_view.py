"""What `dataservice inspect` prints of a record, a record file or an archive.

Invariants: --json and the text say the same; text for people shows the beginning of long texts,
--json all of them; control characters of the data do not reach the terminal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.filesize import decimal

from dataservice.config import Config
from dataservice.core.vision import VisionRules, image_tokens, num_patches, planned_size
from dataservice.linting.archive_summary import ArchiveSummary
from dataservice.linting.file_summary import FileSummary
from dataservice.linting.inspecting import InspectedImage, InspectedRecord
from dataservice.storage.records import is_data_uri

SHOWN = 600
"""Characters of a turn."""
NAME_SHOWN = 80
_METHODS = {
    0: "stored in its archive",
    8: "deflated in its archive",
    9: "deflate64 in its archive",
    12: "bzip2 in its archive",
    14: "lzma in its archive",
    93: "zstd in its archive",
    -1: "as it is",
    -2: "within the record",
    -3: "in the Parquet file",
}


def record_object(found: InspectedRecord, config: Config, places: list[Any] | None) -> Any:
    """`places`: of it in steps of the plan; None when nobody asked."""
    record, measures, line = found.record, found.measures, found.line
    told: dict[str, Any] = {
        "kind": "record",
        "source": found.source,
        "file": found.file,
        "key": found.key,
        "line": line.number,
        "offset": line.offset,
        "size_bytes": line.length,
        "outcome": "ok" if found.reason is None else "rejected",
        "reason": found.reason,
        "layout": None if record is None else record.layout,
        "documents": found.num_docs,
        "turns": None,
        "images": [_image_object(image, config.plan.vision) for image in found.images],
        "tokens": None,
        "places": places,
    }
    if record is not None:
        told["turns"] = [{"role": turn.role, "pieces": turn.pieces} for turn in record.turns]
    if measures is not None:
        told["tokens"] = {
            "length": int(measures.length[0]),
            "image_tokens": int(measures.image_tokens[0]),
            "loss_tokens": int(measures.loss_tokens[0]),
            "patches": int(measures.num_patches[0]),
            "cost": found.cost,
            "cost_model": config.plan.cost,
            "pack_length": config.plan.pack_length,
        }
    return told


def _image_object(image: InspectedImage, rules: VisionRules) -> dict[str, Any]:
    spec = image.spec
    high, wide = planned_size(spec.height, spec.width, rules)
    return {
        "named": "data URI" if is_data_uri(image.named) else _valid(image.named),
        "file": _valid(image.file),
        "member": _valid(spec.member),
        "offset": spec.offset,
        "stored_as": _stored_as(spec.method),
        "stored_bytes": spec.stored_bytes,
        "size_bytes": spec.size_bytes,
        "crc32": None if spec.crc32 < 0 else f"{spec.crc32:08x}",
        "width": spec.width,
        "height": spec.height,
        "planned_width": wide,
        "planned_height": high,
        "patches": num_patches(high, wide, rules),
        "tokens": image_tokens(high, wide, rules),
        "outcome": "ok" if image.reason is None else "rejected",
        "reason": image.reason,
    }


def _valid(text: str) -> str:
    """With "?" for what is no character, which names on disk may have."""
    return text.encode(errors="replace").decode()


def record_text(told: dict[str, Any], plan_oversize: str) -> Iterator[str]:
    """The lines for a person, of what `record_object` gave."""
    yield f"{told['key']}"
    yield (
        f"  in {told['file']}, line {told['line']:,}, {told['size_bytes']:,} bytes at offset "
        f"{told['offset']:,}"
    )
    if told["layout"] is not None:
        documents = "" if told["documents"] == 1 else f", {told['documents']:,} documents"
        yield f"  layout {told['layout']}, {len(told['turns']):,} turns{documents}"
    yield f"  {'good' if told['reason'] is None else 'cannot be used: ' + told['reason']}"
    if told["tokens"] is not None:
        yield from _tokens_text(told["tokens"], plan_oversize)
    number = 0
    for turn in told["turns"] or ():
        text, number = _turn_text(turn["pieces"], number)
        yield f"\n[{turn['role']}] {text}"
    for i, image in enumerate(told["images"]):
        yield ""
        yield from _image_text(i, image)
    if told["places"] is not None:
        yield ""
        yield from _places_text(told["places"])


def _tokens_text(tokens: dict[str, Any], plan_oversize: str) -> Iterator[str]:
    yield (
        f"  {tokens['length']:,} tokens: {tokens['length'] - tokens['image_tokens']:,} of text, "
        f"{tokens['image_tokens']:,} of images; {tokens['loss_tokens']:,} with loss; "
        f"{tokens['patches']:,} patches; cost {tokens['cost']:,} ({tokens['cost_model']})"
    )
    if tokens["length"] > tokens["pack_length"]:
        what = f"plan.oversize: {plan_oversize}" if tokens["patches"] else "split into pieces"
        yield f"  longer than a pack of {tokens['pack_length']:,} tokens: {what}"


def _turn_text(pieces: Sequence[str], number: int) -> tuple[str, int]:
    """The pieces with the images between them, of which the first is `number`; and the next."""
    parts = [pieces[0]]
    for piece in pieces[1:]:
        parts.append(f"<image {number}>{piece}")
        number += 1
    text = "".join(parts)
    more = f" ... {len(text) - SHOWN:,} more characters" if len(text) > SHOWN else ""
    return plain(text[:SHOWN]) + more, number


def plain(text: str) -> str:
    """Control characters by their pictures, but for line ends."""
    pictures = {code: 0x2400 + code for code in range(32) if code != 10}
    others = dict.fromkeys((127, *range(128, 160), *range(55296, 57344)), 65533)
    return text.translate(pictures | others)


def _image_text(number: int, image: dict[str, Any]) -> Iterator[str]:
    yield f"image {number}: {plain(image['named'][:NAME_SHOWN])}"
    where = f"  {image['stored_as']}, {image['file']}"
    if image["member"] and image["stored_as"].endswith("archive"):
        where += f", member {plain(image['member'])} at offset {image['offset']:,}"
    yield where
    if image["size_bytes"]:
        crc = "" if image["crc32"] is None else f", CRC-32 {image['crc32']}"
        yield f"  {image['size_bytes']:,} bytes ({image['stored_bytes']:,} stored){crc}"
    yield (
        f"  {image['width']} x {image['height']} pixels by its header, planned as "
        f"{image['planned_width']} x {image['planned_height']}: {image['patches']:,} patches, "
        f"{image['tokens']:,} tokens"
    )
    yield f"  {'decodes' if image['reason'] is None else 'cannot be used: ' + image['reason']}"


def _places_text(places: list[Any]) -> Iterator[str]:
    if not places:
        yield "not in these steps"
    for at in places:
        yield (
            f"step {at['step']}, micro-step {at['micro_step']}, rank {at['dp_rank']}: pack "
            f"{at['pack_id']} (number {at['number']}), as {at['sample_key']}"
        )


# ---- a file -------------------------------------------------------------------------------------


def file_object(found: FileSummary, config: Config) -> dict[str, Any]:
    return {
        "kind": "file",
        "source": found.source,
        "file": found.file,
        "size_bytes": found.size_bytes,
        "packing": found.packing or None,
        "outcome": "rejected" if found.rejected else "ok",
        "records": found.records,
        "rejected": found.rejected,
        "reasons": [
            {"count": kind.count, "reason": kind.reason, "line": kind.line}
            for kind in sorted(found.kinds.values(), key=lambda kind: -kind.count)
        ],
        "layouts": found.layouts,
        "tokens": {
            "text_tokens": found.text_tokens,
            "image_tokens": found.image_tokens,
            "loss_tokens": found.loss_tokens,
            "median": found.percentile(50),
            "p99": found.percentile(99),
            "longest": found.longest[0],
            "longest_line": found.longest[1] or None,
            "over_pack": found.over_pack,
            "pack_length": config.plan.pack_length,
        },
        "num_images": found.num_images,
        "images_in": found.images_in,
    }


def file_text(told: dict[str, Any]) -> Iterator[str]:
    tokens = told["tokens"]
    packed = f", {told['packing']}" if told["packing"] else ""
    yield f"{told['file']} (source {told['source']}, {decimal(told['size_bytes'])}{packed})"
    layouts = ", ".join(f"{count:,} {name}" for name, count in told["layouts"].items())
    yield f"  {told['records']:,} records: {layouts or 'none good'}; {told['rejected']:,} rejected"
    for kind in told["reasons"]:
        yield f"    {kind['count']:,} x {kind['reason']} (line {kind['line']:,} is the first)"
    yield (
        f"  {tokens['text_tokens']:,} text tokens, {tokens['image_tokens']:,} image tokens, "
        f"{tokens['loss_tokens']:,} with loss"
    )
    if tokens["longest_line"]:
        yield (
            f"  tokens of a record: {tokens['median']:,} half of them, {tokens['p99']:,} at 99 %, "
            f"{tokens['longest']:,} the longest (line {tokens['longest_line']:,}); "
            f"{tokens['over_pack']:,} are longer than a pack of {tokens['pack_length']:,}"
        )
    yield f"  {told['num_images']:,} images"
    for place, count in told["images_in"].items():
        name = "the file itself" if place == told["file"] else place
        yield f"    {count:,} in {name}"


# ---- an archive ---------------------------------------------------------------------------------


def archive_object(found: ArchiveSummary) -> dict[str, Any]:
    bad = found.reason is not None or found.num_bad > 0
    return {
        "kind": "archive",
        "file": found.file,
        "archive": found.kind,
        "size_bytes": found.size_bytes,
        "outcome": "rejected" if bad else "ok",
        "reason": found.reason,
        "members": found.members,
        "unpacked_bytes": found.unpacked_bytes,
        "stored_as": {_stored_as(code): count for code, count in found.methods.items()},
        "num_bad": found.num_bad,
        "bad": [{"member": _valid(name), "reason": reason} for name, reason in found.bad],
    }


def archive_text(told: dict[str, Any]) -> Iterator[str]:
    yield f"{told['file']} ({told['archive']}, {decimal(told['size_bytes'])})"
    if told["reason"] is not None:
        yield f"  cannot be used: {told['reason']}"
        return
    stored = ", ".join(f"{count:,} {how}" for how, count in told["stored_as"].items())
    yield f"  {told['members']:,} members of {decimal(told['unpacked_bytes'])}: {stored or 'none'}"
    yield f"  {told['num_bad']:,} of them cannot be read, by its directory; `lint` reads them all"
    for bad in told["bad"]:
        yield f"    {plain(bad['member'])}: {bad['reason']}"


def _stored_as(code: int) -> str:
    return _METHODS.get(code, f"method {code}")

"""Pages that show a pack to a person: its text token by token, which carry loss, its pictures.

Invariants: whatever stands in the data is escaped, and the page may load nothing, also not by
mistake; pictures are what the model is given, in the size that it sees, shown smaller; tokens that
make a character only together are shown together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataservice.actors.offline import PlacedPack
from dataservice.cli.pack_pictures import data_url, pictures_in
from dataservice.core.vision import VisionRules
from dataservice.pipeline.documents import IGNORE
from dataservice.pipeline.text import TextRenderer

_TOKENS_A_CHARACTER = 8
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_STYLE = """
body { font: 15px/1.6 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem;
  color: #1c1e21; background: #fafaf8; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; } h2 { font-size: 1rem; overflow-wrap: anywhere; }
section { background: #fff; border: 1px solid #e3e3de; border-radius: 8px; padding: .6rem 1rem;
  margin: 0 0 1rem; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate;
  font: 13px/1.7 ui-monospace, monospace; }
i { font-style: normal; border-left: 1px solid #c9c9c2; } i.l { background: #cdeccf; }
.k { display: inline-block; background: #e7e9f7; border-radius: 4px; padding: 0 .4em; }
.h { border-left: 4px solid #d55e00; padding-left: .6rem; }
figure { display: inline-block; margin: .4rem .8rem .4rem 0; }
figcaption { font-size: 12px; color: #5c6270; } img { border: 1px solid #e3e3de; }
.strip, .key { background: repeating-linear-gradient(45deg, #efefeb 0 4px, #d2d2ca 4px 8px);
  border: 1px solid #9a9a92; }
.strip { display: flex; height: 1.1rem; min-width: 18rem; margin: .3rem 0; }
.strip b { display: flex; height: 100%; border-right: 1px solid #1c1e21; box-sizing: border-box; }
.strip b:nth-child(even) { filter: brightness(.88); }
.strip b.lost { border-left: 4px solid #d55e00; }
.strip u { height: 100%; } .text0 { background: #fff; } .text1 { background: #8fd19b; }
.images { background: #7488d8; } .small { font-size: 12px; color: #5c6270; }
.key { display: inline-block; width: 1.4rem; height: .8rem; margin: 0 .3rem 0 .9rem; }
.lostkey { display: inline-block; width: 4px; height: 1rem; margin: 0 .3rem -.15rem .9rem;
  background: #d55e00; }
.wide { overflow-x: auto; } table { border-collapse: collapse; } td, th { text-align: left;
  padding: .15rem 1.1rem .15rem 0; vertical-align: top; white-space: nowrap; }
td:last-child { white-space: normal; min-width: 20rem; overflow-wrap: anywhere; }
tr + tr { border-top: 1px solid #e3e3de; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1.1rem; }
dt { color: #5c6270; } dd { margin: 0; overflow-wrap: anywhere; }
"""
_LEGEND = (
    '<p class="small">A bar is a pack, a piece of it a document: <span class="key images"></span>'
    'images <span class="key text1"></span>text with loss <span class="key text0"></span>other '
    'text <span class="key"></span>padding <span class="lostkey"></span>a hole in the document</p>'
)
_COLUMNS = {
    "step": "step",
    "micro_step": "micro-step",
    "dp_rank": "rank",
    "pack_id": "pack",
    "number": "number",
    "tokens": "tokens",
    "loss_tokens": "with loss",
    "num_images": "images",
}


def _page(title: str, body: str) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n{body}</body></html>\n"
    )


def index_page(
    title: str,
    facts: Mapping[str, str],
    rows: Sequence[Mapping[str, Any]],
    strips: Sequence[str],
) -> str:
    """Links the pages of the packs, which lie beside it; `strips`: of each, as markup."""
    told = "".join(f"<dt>{name}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    columns = (*_COLUMNS.values(), "holes", "digest", "documents")
    head = "".join(f"<th>{name}</th>" for name in columns)
    lines = []
    for row, bar in zip(rows, strips, strict=True):
        cells = [escape(str(row[name])) for name in _COLUMNS]
        cells[3] = f'<a href="{escape(row["file"])}.html">{cells[3]}</a>'
        cells += [str(len(row["holes"])), escape(row["digest"][:12])]
        cells.append(f'{bar}<div class="small">{escape(", ".join(row["sample_keys"]))}</div>')
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    table = f'<div class="wide"><table><tr>{head}</tr>{"".join(lines)}</table></div>'
    return _page(title, f"<dl>{told}</dl>\n{_LEGEND}\n{table}")


def strip(pack: PlacedPack, renderer: TextRenderer) -> str:
    """A bar as long as the pack: its documents, and of each its image tokens, text with loss and
    other text, one after the other."""
    arrays, meta = pack.built.arrays, pack.built.meta
    bounds, keys = arrays["cu_seqlens"].tolist(), meta["sample_keys"]
    lost = [hole.partition("#")[0] for hole in meta["holes"]]
    parts = []
    for number, key in enumerate(keys):
        place = slice(bounds[number], bounds[number] + int(arrays["doc_lengths"][number]))
        ids, labels = arrays["input_ids"][place], arrays["labels"][place]
        span = bounds[number + 1] - bounds[number]  # with the filler behind it
        images = int((ids == renderer.image_token).sum())
        loss = int((labels != IGNORE).sum())
        counts = {"images": images, "text1": loss, "text0": len(ids) - images - loss}
        inner = "".join(
            f'<u class="{kind}" style="width:{count / span:.2%}"></u>'
            for kind, count in counts.items()
            if count > 0
        )
        hole = ' class="lost"' if key.partition("[")[0] in lost else ""
        words = f"{key}: {len(ids):,} tokens, {images:,} of images, {loss:,} with loss"
        share = span / pack.spec.pack_length
        parts.append(f'<b{hole} style="width:{share:.3%}" title="{escape(words)}">{inner}</b>')
    words = f"{len(keys)} documents, {pack.spec.num_tokens:,} of {pack.spec.pack_length:,} tokens"
    return f'<div class="strip" role="img" aria-label="{escape(words)}">{"".join(parts)}</div>'


def pack_page(
    row: Mapping[str, Any], pack: PlacedPack, renderer: TextRenderer, rules: VisionRules
) -> str:
    arrays = pack.built.arrays
    bounds, lengths = arrays["cu_seqlens"].tolist(), arrays["doc_lengths"].tolist()
    keys = row["sample_keys"]
    owners, pictures = arrays["image_doc_ids"], list(pictures_in(arrays, rules))
    parts = [
        "<p>Each token begins at a line; those on green carry loss. Pictures are what the model "
        'gets. <a href="index.html">All packs</a></p>',
        _LEGEND,
        strip(pack, renderer),
        *(f'<p class="h">hole: {escape(hole)}</p>' for hole in row["holes"]),
    ]
    for number, (first, length) in enumerate(zip(bounds[:-1], lengths, strict=True)):
        if number >= len(keys):
            parts.append(f"<section><h2>padding: {length:,} tokens</h2></section>")
            continue
        place = slice(first, first + length)
        ids, labels = arrays["input_ids"][place], arrays["labels"][place]
        mine = [pictures[i] for i in np.flatnonzero(owners == number).tolist()]
        text = "".join(_tokens(ids, labels, [tokens for tokens, _ in mine], renderer))
        figures = "".join(
            f'<figure><img src="{data_url(pixels)}" alt="image {i}"><figcaption>image {i}: '
            f"{pixels.shape[1]} x {pixels.shape[0]}, {tokens} tokens</figcaption></figure>"
            for i, (tokens, pixels) in enumerate(mine)
        )
        loss = int((labels != IGNORE).sum())
        parts.append(
            f"<section><h2>{escape(keys[number])}</h2><p>tokens {first:,} to "
            f"{first + length - 1:,}, {loss:,} with loss</p>{figures}"
            f'<div class="text">{text}</div></section>'
        )
    where = f"micro-step {row['micro_step']}, rank {row['dp_rank']}"
    return _page(
        f"Step {row['step']}, {where}: pack {row['pack_id']}, {row['digest'][:12]}",
        "\n".join(parts),
    )


def _tokens(
    ids: NDArray[np.int32],
    labels: NDArray[np.int32],
    image_tokens: Sequence[int],
    renderer: TextRenderer,
) -> Iterator[str]:
    """`image_tokens`: of each image of the document."""
    images = iter(enumerate(image_tokens))
    at, stop = 0, len(ids)
    while at < stop:
        if ids[at] == renderer.image_token:
            found = next(images, None)
            run = _run(ids, at)
            count = run if found is None else min(run, found[1])
            name = "image tokens" if found is None else f"image {found[0]}"
            yield f'<span class="k">{name} ({count} tokens)</span>'
            at += count
            continue
        size, text = _piece(ids, at, renderer)
        kind = ' class="l"' if (labels[at : at + size] != IGNORE).any() else ""
        named = " ".join(map(str, ids[at : at + size].tolist()))
        yield f'<i{kind} title="{named}">{_shown(text)}</i>'
        at += size


def _run(ids: NDArray[np.int32], at: int) -> int:
    """How often the token at a place stands there."""
    others = np.flatnonzero(ids[at:] != ids[at])
    return int(others[0]) if others.size else len(ids) - at


def _piece(ids: NDArray[np.int32], at: int, renderer: TextRenderer) -> tuple[int, str]:
    """The fewest tokens from a place on that are whole characters, and their text."""
    before = renderer.decode(ids[max(0, at - 1) : at])
    for size in range(1, min(_TOKENS_A_CHARACTER, len(ids) - at) + 1):
        if "�" not in renderer.decode(ids[at : at + size]):
            # with the token before it, for some decoders drop a space in front
            both = renderer.decode(ids[max(0, at - 1) : at + size])
            joined = both.startswith(before) and "�" not in before
            return size, both[len(before) :] if joined else renderer.decode(ids[at : at + size])
    return 1, renderer.decode(ids[at : at + 1])


def _shown(text: str) -> str:
    """Control characters by their pictures."""
    pictures = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {0x7F: 0x2421}
    return escape(text.translate(pictures).replace("\n", "↵\n"))

"""What it costs to read records and to count their tokens, on one core.

Records are read by `RecordReader.read` and counted with the byte tokenizer and the ChatML template,
as the index does it for every line. Each figure is the best of several rounds over lines that
differ, so that nothing is read twice in a row; orjson alone, which reads everything and counts
nothing, stands beside it from the same rounds.

    python benchmarks/storage_records.py [--quick]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import orjson

from benchmarks.figures import Figure
from dataservice.pipeline.text import TextRenderer, TextSettings
from dataservice.storage.records import RecordReader

LINE_BYTES = 850
TARGET_US = 6.0
WORDS = "the bus in this picture is white and red with a wide door on its left side".split()
Make = Callable[[int, np.random.Generator], dict[str, Any]]


def text(rng: np.random.Generator, size: int) -> str:
    words = rng.choice(WORDS, size // 4)
    return " ".join(words)[:size]


def llava(number: int, rng: np.random.Generator) -> dict[str, Any]:
    turns = [
        {"from": "human", "value": "<image>\n" + text(rng, 310)},
        {"from": "gpt", "value": text(rng, 400)},
    ]
    return {"id": f"{number:012d}", "image": f"coco/{number:012d}.jpg", "conversations": turns}


def messages(number: int, rng: np.random.Generator) -> dict[str, Any]:
    asked = [{"type": "image"}, {"type": "text", "text": text(rng, 250)}]
    turns = [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": text(rng, 350)},
    ]
    return {"messages": turns, "images": [f"{number:012d}.jpg"]}


def plain(number: int, rng: np.random.Generator) -> dict[str, Any]:
    return {"text": text(rng, 800), "source": f"books/{number}"}


def obelics(number: int, rng: np.random.Generator) -> dict[str, Any]:
    texts = [text(rng, 200), None, text(rng, 200), None, text(rng, 200)]
    images = [None, f"{number}a.jpg", None, f"{number}b.jpg", None]
    return {"images": images, "texts": texts, "metadata": "[]", "general_metadata": "{}"}


def mmc4(number: int, rng: np.random.Generator) -> dict[str, Any]:
    infos = [
        {"image_name": f"{number}-{i}.png", "raw_url": "u", "matched_text_index": i}
        for i in range(2)
    ]
    return {"text_list": [text(rng, 150) for _ in range(4)], "image_info": infos}


def finevision(number: int, rng: np.random.Generator) -> dict[str, Any]:
    turns = [{"user": text(rng, 300), "assistant": text(rng, 350)}]
    return {"images": [f"{number}.png"], "texts": turns, "relevance_ratings": [4]}


def caption(number: int, rng: np.random.Generator) -> dict[str, Any]:
    key = f"{number:09d}"
    names = {"url": f"https://example.org/{key}", "key": key, "status": "success"}
    return {"caption": text(rng, 700), **names, "width": 640, "height": 480}


def with_matrix(number: int, rng: np.random.Generator) -> dict[str, Any]:
    return {**mmc4(number, rng), "similarity_matrix": rng.random((60, 800)).round(6).tolist()}


def with_boxes(number: int, rng: np.random.Generator) -> dict[str, Any]:
    return {**llava(number, rng), "boxes": rng.integers(0, 999, (40_000, 4)).tolist()}


def with_long_string(number: int, rng: np.random.Generator) -> dict[str, Any]:
    return {**llava(number, rng), "html": text(rng, 800_000)}


LAYOUTS: dict[str, Make] = {
    "LLaVA, two turns, one image": llava,
    "messages, content parts": messages,
    "plain text": plain,
    "OBELICS, two images": obelics,
    "MMC4, two images": mmc4,
    "FineVision": finevision,
    "img2dataset caption": caption,
}
UNREAD: dict[str, Make] = {
    "a similarity matrix": with_matrix,
    "40,000 boxes": with_boxes,
    "a long string": with_long_string,
}


def lines_of(make: Make, count: int) -> list[bytes]:
    rng = np.random.Generator(np.random.Philox(7))
    return [json.dumps(make(number, rng)).encode() for number in range(count)]


def seconds_a_line(works: Sequence[Callable[[bytes], object]], lines: list[bytes], rounds: int):
    """Of each, the best of rounds that take turns."""
    best = [float("inf")] * len(works)
    for _ in range(rounds):
        for i, work in enumerate(works):
            start = time.perf_counter()
            for line in lines:
                work(line)
            best[i] = min(best[i], time.perf_counter() - start)
    return [seconds / len(lines) for seconds in best]


def run(quick: bool) -> list[Figure]:
    reader, renderer = RecordReader(), TextRenderer.build(TextSettings())

    def read_and_count(line: bytes) -> None:
        renderer.count(reader.read(line))

    figures = []
    rounds = 3 if quick else 15
    for name, make in LAYOUTS.items():
        lines = lines_of(make, 500 if quick else 4000)
        mean = sum(map(len, lines)) / len(lines)
        both, read, exactly, other = seconds_a_line(
            (read_and_count, reader.read, reader.read_exactly, orjson.loads), lines, rounds
        )
        target = make is llava
        figures.append(
            Figure(
                name=f"record read and counted: {name}",
                value=both * 1e6,
                unit="us",
                target=f"at most {TARGET_US:g} us" if target else "",
                reached=both * 1e6 <= TARGET_US if target else None,
                note=f"{mean:.0f} B a line, {1 / both / 1e3:.0f} k lines/s, "
                f"{mean / both / 1e6:.0f} MB/s; read alone {read * 1e6:.1f} us, "
                f"without compiled decoders {exactly * 1e6:.1f} us; "
                f"orjson alone {other * 1e6:.1f} us",
            )
        )
    for name, make in UNREAD.items():
        lines = lines_of(make, 5 if quick else 20)
        mean = sum(map(len, lines)) / len(lines)
        both, exactly, other = seconds_a_line(
            (read_and_count, reader.read_exactly, orjson.loads), lines, rounds
        )
        figures.append(
            Figure(
                name=f"record with an unread field: {name}",
                value=mean / both / 1e6,
                unit="MB/s",
                note=f"{mean / 1e3:.0f} kB a line; without compiled decoders "
                f"{mean / exactly / 1e6:.0f} MB/s; orjson alone {mean / other / 1e6:.0f} MB/s",
            )
        )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few seconds, rough figures")
    for figure in run(parser.parse_args().quick):
        reached = {None: "", True: "  reached", False: "  MISSED"}[figure.reached]
        target = f"  ({figure.target}{reached})" if figure.target else ""
        print(f"{figure.name}: {figure.value:.3g} {figure.unit}{target}\n    {figure.note}")


if __name__ == "__main__":
    main()

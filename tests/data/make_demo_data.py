"""Makes the demo corpus in this folder from public-domain sources; LICENSES.md names each.

    python make_demo_data.py SOURCES [OUT]

SOURCES holds an unpacked scikit-image 0.26.0 wheel (`skimage/data`) and the unpacked Debian
packages `r-cran-janeaustenr` 1.0.0 and `miscfiles` 1.5 (`usr/...` below it); with Debian:

    pip download scikit-image==0.26.0 --no-deps && unzip scikit_image-*.whl
    apt-get download r-cran-janeaustenr miscfiles && for d in *.deb; do dpkg -x $d .; done

Invariants: the same sources and Pillow version give the same bytes; the whole is below 3 MB.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SEED = 20240229
NUM_TEXT, NUM_TALKS, NUM_CAPTIONS, NUM_MULTI = 400, 30, 150, 60
ORIENTATION = 0x0112

# name, file in skimage/data, what it shows in four languages
PICTURES = [
    (
        "astronaut",
        "astronaut.png",
        "an astronaut in an orange suit in front of a flag",
        "eine Astronautin im orangefarbenen Anzug vor einer Flagge",
        "une astronaute en combinaison orange devant un drapeau",
        "旗の前に立つ宇宙飛行士",
    ),
    (
        "brick",
        "brick.png",
        "a wall of old bricks",
        "eine Mauer aus alten Ziegeln",
        "un mur de vieilles briques",
        "古い煉瓦の壁",
    ),
    (
        "camera",
        "camera.png",
        "a man with a camera on a tripod",
        "ein Mann mit einer Kamera auf einem Stativ",
        "un homme avec un appareil photo sur un trépied",
        "三脚のカメラをのぞく男性",
    ),
    (
        "cell",
        "cell.png",
        "a single cell that floats in saline",
        "eine einzelne Zelle in Kochsalzlösung",
        "une cellule isolée dans une solution saline",
        "生理食塩水に浮かぶ細胞",
    ),
    (
        "chelsea",
        "chelsea.png",
        "the face of a tabby cat",
        "das Gesicht einer getigerten Katze",
        "la tête d'un chat tigré",
        "とら猫の顔",
    ),
    (
        "clock",
        "clock_motion.png",
        "a wall clock, blurred by motion",
        "eine Wanduhr, durch Bewegung verwischt",
        "une horloge murale floue",
        "ぶれて写った掛け時計",
    ),
    (
        "coffee",
        "coffee.png",
        "a cup of espresso with a spoon on a saucer",
        "eine Tasse Espresso mit Löffel auf einer Untertasse",
        "une tasse d'expresso avec une cuillère sur sa soucoupe",
        "受け皿にのったエスプレッソ",
    ),
    (
        "grass",
        "grass.png",
        "blades of grass from above",
        "Grashalme von oben",
        "des brins d'herbe vus d'en haut",
        "上から見た草",
    ),
    (
        "gravel",
        "gravel.png",
        "gravel on the ground",
        "Kies auf dem Boden",
        "du gravier sur le sol",
        "地面の砂利",
    ),
    (
        "horse",
        "horse.png",
        "the black silhouette of a horse",
        "die schwarze Silhouette eines Pferdes",
        "la silhouette noire d'un cheval",
        "馬の黒いシルエット",
    ),
    (
        "hubble",
        "hubble_deep_field.jpg",
        "thousands of distant galaxies",
        "Tausende ferner Galaxien",
        "des milliers de galaxies lointaines",
        "遠くの無数の銀河",
    ),
    (
        "microaneurysms",
        "microaneurysms.png",
        "small lesions in a retina",
        "kleine Schäden in einer Netzhaut",
        "de petites lésions dans une rétine",
        "網膜の小さな病変",
    ),
    (
        "retina",
        "retina.jpg",
        "the retina of a human eye",
        "die Netzhaut eines menschlichen Auges",
        "la rétine d'un œil humain",
        "人の目の網膜",
    ),
    (
        "rocket",
        "rocket.jpg",
        "a rocket that leaves its launch pad",
        "eine Rakete, die von der Rampe abhebt",
        "une fusée qui quitte son pas de tir",
        "発射台を離れるロケット",
    ),
    (
        "text",
        "text.png",
        "handwritten formulas",
        "handgeschriebene Formeln",
        "des formules écrites à la main",
        "手書きの数式",
    ),
]
QUESTIONS = [
    ("What is shown here?", "The picture shows {}."),
    ("Was ist hier zu sehen?", "Zu sehen ist {}."),
    ("Que voit-on ici ?", "On voit {}."),
    ("何が写っていますか。", "{}です。"),
]
FOLLOW_UPS = [
    ("How large is the picture?", "It is {w} pixels wide and {h} pixels high."),
    ("Is it wider than high?", "{wider}"),
    ("Which side is longer, and by how much?", "The difference is {d} pixels."),
]


@dataclass
class Shard:
    """A JSONL file and, once it has pictures, the zip of the same stem."""

    stem: Path
    method: int = zipfile.ZIP_STORED
    records: list[dict[str, Any]] = field(default_factory=list)
    members: dict[str, bytes] = field(default_factory=dict)

    def write(self) -> None:
        self.stem.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in self.records]
        self.stem.with_suffix(".jsonl").write_text("".join(lines), encoding="utf-8")
        if not self.members:
            return
        with zipfile.ZipFile(self.stem.with_suffix(".zip"), "w") as archive:
            for name, data in self.members.items():
                info = zipfile.ZipInfo(name)  # its date is fixed, 1980-01-01
                info.create_system, info.external_attr = 3, 0o644 << 16
                info.compress_type = self.method
                archive.writestr(info, data)


class Pictures:
    """Crops of the sources, scaled to very unequal sizes, as JPEG or PNG."""

    def __init__(self, folder: Path, rng: np.random.Generator) -> None:
        self._rng = rng
        self._sources = []
        for _, file, *_ in PICTURES:
            with Image.open(folder / file) as image:
                self._sources.append(image.convert("RGB"))

    def crop(self, number: int, pixels: float, aspect: float) -> Image.Image:
        """About `pixels` in area and `aspect` wide to one high, at least 24 on a side."""
        source = self._sources[number]
        width = max(24, round((pixels * aspect) ** 0.5))
        height = max(24, round((pixels / aspect) ** 0.5))
        scale = min(source.width / width, source.height / height)
        zoom = scale * (0.6 + 0.4 * self._rng.random())
        box_width, box_height = width * zoom, height * zoom
        left = self._rng.random() * (source.width - box_width)
        top = self._rng.random() * (source.height - box_height)
        box = (left, top, left + box_width, top + box_height)
        return source.resize((width, height), Image.Resampling.LANCZOS, box)

    def random(self, low: float, high: float) -> tuple[int, Image.Image]:
        """A picture with an area log-uniform between the two, and the number of its source."""
        number = int(self._rng.integers(len(PICTURES)))
        pixels = low * (high / low) ** self._rng.random()
        aspect = 2.0 ** (1.6 * (self._rng.random() - 0.5) * 2)
        return number, self.crop(number, pixels, aspect)


def jpeg(image: Image.Image, quality: int = 60, **options: Any) -> bytes:
    stored = io.BytesIO()
    image.save(stored, "JPEG", quality=quality, **options)
    return stored.getvalue()


def png(image: Image.Image) -> bytes:
    stored = io.BytesIO()
    image.save(stored, "PNG", optimize=True)
    return stored.getvalue()


def novels(sources: Path) -> list[list[str]]:
    """The paragraphs of two novels, out of an R package's lazy-load data base."""
    path = sources / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
    data, books = path.read_bytes(), []
    while data:  # chunks: inflated size, then a zlib stream of one serialised object
        chunk = zlib.decompressobj()
        lines = list(_r_strings(chunk.decompress(data[4:])))
        data = chunk.unused_data
        if lines[0] in ("NORTHANGER ABBEY", "Persuasion"):
            paragraphs = "\n".join(line.rstrip() for line in lines).split("\n\n")
            books.append([p.strip("\n") for p in paragraphs if len(p) > 40])
    return books


def _r_strings(data: bytes) -> Iterator[str]:
    """The items of a serialised character vector (big endian, version 3)."""
    encoding_length = struct.unpack_from(">I", data, 14)[0]
    position = 18 + encoding_length
    _, count = struct.unpack_from(">II", data, position)
    position += 8
    for _ in range(count):
        _, length = struct.unpack_from(">Ii", data, position)
        yield data[position + 8 : position + 8 + length].decode()
        position += 8 + length


def state_papers(sources: Path) -> list[str]:
    return [
        gzip.decompress((sources / "usr/share/state" / name).read_bytes()).decode("ascii").strip()
        for name in ("us-declaration.gz", "us-constitution.gz")
    ]


class Prose:
    """Consecutive paragraphs, as much as is asked for, taken from a random place."""

    def __init__(self, books: list[list[str]], rng: np.random.Generator) -> None:
        self._books = books
        self._rng = rng

    def take(self, size: int) -> str:
        """At most `size` characters, cut at a word."""
        book = self._books[int(self._rng.integers(len(self._books)))]
        start = int(self._rng.integers(len(book) - 60))
        text = book[start]
        for paragraph in book[start + 1 : start + 120]:
            if len(text) >= size:
                break
            text += "\n\n" + paragraph
        return text if len(text) <= size else text[:size].rsplit(None, 1)[0]


def make_text(out: Path, prose: Prose, papers: list[str], rng: np.random.Generator) -> None:
    shards = [Shard(out / f"text/text-{i:05d}") for i in range(2)]
    records: list[dict[str, Any]] = [{"text": paper} for paper in papers]
    for _ in range(NUM_TEXT - len(papers)):
        size = int(50 * 400 ** (rng.random() ** 1.9))
        records.append({"text": prose.take(size)})
    for number in range(NUM_TALKS):
        opening = prose.take(int(60 + 400 * rng.random()))
        turns = [("human", f"Continue the story:\n{opening}"), ("gpt", prose.take(600))]
        if number % 3 == 0:
            turns += [("human", "And then?"), ("gpt", prose.take(200))]
        if number % 5 == 0:
            turns.insert(0, ("system", "Answer in the manner of an old novel."))
        records.append({"id": f"talk-{number:03d}", "conversations": conversation(turns)})
    for place, number in enumerate(rng.permutation(len(records))):
        shards[place % 2].records.append(records[number])
    for shard in shards:
        shard.write()


def conversation(turns: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"from": speaker, "value": text} for speaker, text in turns]


def make_captions(out: Path, pictures: Pictures, rng: np.random.Generator) -> None:
    shards = [Shard(out / f"caption/caption-{i:05d}") for i in range(2)]
    names = [name for name, *_ in PICTURES]
    for number in range(NUM_CAPTIONS):
        shard = shards[number % 2]
        source, image = pictures.random(2_000, 90_000)
        suffix, data = ".jpg", None
        if number in (10, 71):  # the large ones: 2 MP, upscaled where the source is smaller
            source = names.index("retina" if number == 10 else "rocket")
            image = pictures.crop(source, 2_000_000, 1.0 if number == 10 else 1.5)
            data = jpeg(image, quality=30)
        elif number in (20, 41):
            source = names.index("hubble" if number == 20 else "coffee")
            image = pictures.crop(source, 500_000, 1.2)
            data = jpeg(image, quality=40)
        elif number == 30:  # stored lying, to be shown upright
            image = pictures.crop(source, 40_000, 0.5)
            data = turned(image)
        elif number == 51:
            image = pictures.crop(source, 12_000, 1.3)
            data, suffix = png(with_alpha(image)), ".png"
        elif number == 60:
            image = pictures.crop(source, 9_000, 1.0)
            data, suffix = transparent_palette(image), ".png"
        elif number == 81:  # a few bytes are missing at the end
            image = pictures.crop(source, 30_000, 1.4)
            data = jpeg(image)
            data = data[: len(data) * 6 // 10]
        elif number % 9 == 0:
            image = image.resize((40 + number % 40, 60))
            data, suffix = png(image), ".png"
        elif number % 11 == 0:
            image = image.convert("L").resize((96, 64))
            data, suffix = png(image), ".png"
        name = f"images/{names[source]}-{number:03d}{suffix}"
        shard.members[name] = data or jpeg(image)
        shard.records.append(caption(number, name, source, image, rng))
        if number % 15 == 7:  # the same picture in a second sample
            shard.records.append(caption(number + 1000, name, source, image, rng))
    for shard in shards:
        shard.write()


def turned(image: Image.Image) -> bytes:
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    return jpeg(image.transpose(Image.Transpose.ROTATE_90), exif=exif)


def with_alpha(image: Image.Image) -> Image.Image:
    y, x = np.mgrid[-1 : 1 : image.height * 1j, -1 : 1 : image.width * 1j]
    alpha = Image.fromarray((255 * (x * x + y * y < 0.8)).astype(np.uint8))
    image = image.copy()
    image.putalpha(alpha)
    return image


def transparent_palette(image: Image.Image) -> bytes:
    stored = io.BytesIO()
    paletted = image.quantize(48)
    paletted.save(stored, "PNG", transparency=bytes(range(0, 240, 5)), optimize=True)
    return stored.getvalue()


def caption(
    number: int, name: str, source: int, image: Image.Image, rng: np.random.Generator
) -> dict[str, Any]:
    language = int(rng.choice(4, p=[0.7, 0.1, 0.1, 0.1]))
    question, answer = QUESTIONS[language]
    asked = f"<image>\n{question}" if number % 4 else f"{question}\n<image>"
    turns = [("human", asked), ("gpt", answer.format(PICTURES[source][2 + language]))]
    if rng.random() < 0.4:
        more, reply = FOLLOW_UPS[int(rng.integers(len(FOLLOW_UPS)))]
        wider = "Yes." if image.width > image.height else "No."
        d = abs(image.width - image.height)
        turns += [
            ("human", more),
            ("gpt", reply.format(w=image.width, h=image.height, d=d, wider=wider)),
        ]
    return {"id": f"caption-{number:06d}", "image": name, "conversations": conversation(turns)}


def make_multi(out: Path, pictures: Pictures, prose: Prose, rng: np.random.Generator) -> None:
    shard = Shard(out / "multi/multi-00000", zipfile.ZIP_DEFLATED)
    stock: list[tuple[str, int]] = []
    for number in range(90):
        source, image = pictures.random(1_500, 60_000)
        suffix, data = (".png", png(image.resize((48, 48)))) if number % 10 == 3 else (".jpg", b"")
        name = f"pages/{number // 10}/{PICTURES[source][0]}-{number:03d}{suffix}"
        shard.members[name] = data or jpeg(image)
        stock.append((name, source))
    for number in range(NUM_MULTI):
        chosen = [stock[i] for i in rng.choice(len(stock), 2 + int(6 * rng.random() ** 2))]
        turns = page(chosen, prose, rng) if number % 2 else comparison(chosen)
        shard.records.append(
            {
                "id": f"multi-{number:06d}",
                "image": [name for name, _ in chosen],
                "conversations": conversation(turns),
            }
        )
    shard.write()


def page(
    chosen: list[tuple[str, int]], prose: Prose, rng: np.random.Generator
) -> list[tuple[str, str]]:
    """Text with pictures between its paragraphs, all in one turn."""
    parts = [prose.take(int(80 + 1200 * rng.random() ** 2)) + "\n<image>\n" for _ in chosen]
    shown = ", then ".join(PICTURES[source][2] for _, source in chosen)
    return [
        ("human", "".join(parts) + "List the pictures in order."),
        ("gpt", f"They show {shown}."),
    ]


def comparison(chosen: list[tuple[str, int]]) -> list[tuple[str, str]]:
    """Pictures over several turns, also side by side and inside a sentence."""
    (_, first), (_, second), *others = chosen
    turns = [
        ("human", "<image><image>\nWhat do these two show?"),
        ("gpt", f"The first shows {PICTURES[first][2]}, the second {PICTURES[second][2]}."),
    ]
    for _, source in others:
        turns += [
            ("human", f"Is <image> like one of them? 🔭 ({PICTURES[source][0]})"),
            ("gpt", "Yes." if source in (first, second) else f"No, it is {PICTURES[source][2]}."),
        ]
    return turns


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the demo corpus.")
    parser.add_argument("sources", type=Path)
    parser.add_argument("out", type=Path, nargs="?", default=Path(__file__).parent)
    arguments = parser.parse_args()
    rng = np.random.Generator(np.random.Philox(SEED))
    pictures = Pictures(arguments.sources / "skimage/data", rng)
    prose = Prose(novels(arguments.sources), rng)
    make_text(arguments.out, prose, state_papers(arguments.sources), rng)
    make_captions(arguments.out, pictures, rng)
    make_multi(arguments.out, pictures, prose, rng)


if __name__ == "__main__":
    main()

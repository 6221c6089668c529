"""README.md and the guides as their readers use them: what they show loads, parses and runs; what
they name exists."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shlex
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer.main
from PIL import Image
from support.local_service import LocalService
from support.pictures import encoded

from dataservice.cli.app import app
from dataservice.config import Config, load_config
from dataservice.indexing import update_index
from dataservice.storage.records import parse_record
from trainer_client import MicroBatch, PackStream, ParallelLayout
from trainer_client.examples.tiny_trainers import arguments as example_arguments
from trainer_client.examples.train_tiny_vlm import ModelSizes, TinyVLM, _arguments
from trainer_client.examples.train_tiny_vlm import main as train_tiny_vlm
from trainer_client.redistribute import RebalancedLoader
from trainer_client.testing import FAKE_INFO, FakeService, synthetic_packs

ROOT = Path(__file__).resolve().parent.parent
README = "README.md"
TRAINER = "trainer_client/README.md"
DATA = "dataservice/storage/README.md"
OPERATING = "dataservice/actors/README.md"
DEPLOY = "deploy/README.md"
"""Its commands are for clusters, those of `dataservice` apart."""
PROMISES = "tests/README.md"
PACKAGES = ("dataservice", "trainer_client")
GUIDES = sorted(
    str(path.relative_to(ROOT))
    for path in (
        *(ROOT / "dataservice").rglob("README.md"),
        *(ROOT / folder / "README.md" for folder in ("benchmarks", "deploy", "tests")),
        ROOT / TRAINER,
        ROOT / README,
        ROOT / ".github/CONTRIBUTING.md",
    )
    if path.is_file()
)
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in GUIDES}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str, guide: str) -> list[str]:
    return [text for name, text in BLOCK.findall(TEXTS[guide]) if name == language]


def commands(guide: str) -> list[list[str]]:
    """Every line of the shell blocks, as words without comment and variables' values."""
    lines = "".join(blocks("bash", guide)).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def test_every_kind_of_block_is_looked_at_here() -> None:
    by_kind: dict[str, set[str]] = {}
    for guide in GUIDES:
        for name, _ in BLOCK.findall(TEXTS[guide]) if guide != DEPLOY else ():
            by_kind.setdefault(name, set()).add(guide)
    assert by_kind.pop("json") == {README, DATA}
    assert by_kind.pop("python") == {README, TRAINER}
    assert by_kind.pop("yaml") == {README, DATA}
    by_kind.pop("bash")
    assert set(by_kind) == {"text"}, "what nobody runs is marked as text"


# ---- data -------------------------------------------------------------------------------------


def loaded(text: str, folder: Path) -> Config:
    path = folder / "config.yaml"
    path.write_text(text)
    return load_config(path)


def test_configs_load(tmp_path: Path) -> None:
    shown = [text for guide in (README, DATA) for text in blocks("yaml", guide)]
    assert len(shown) == 5
    assert blocks("yaml", README)[0] == blocks("yaml", DATA)[0], "the smallest one"
    for text in shown:
        assert loaded(text, tmp_path).sources[0].records[0].startswith(str(tmp_path))
    assert load_config(ROOT / "deploy/example.yaml").sources


def test_records_are_read_as_the_guides_say() -> None:
    (shown,) = blocks("json", DATA)
    records = [parse_record(line.encode()) for line in shown.splitlines()]
    layouts = "llava messages messages obelics mmc4 finevision caption text text".split()
    assert [record.layout for record in records] == layouts
    for record in records[:7]:
        assert record.images == ("cats/1.jpg",)
        assert record.turns[0].pieces[0] == ""
        assert sum(len(turn.pieces) - 1 for turn in record.turns) == 1
    for record in records[:3]:
        assert [turn.role for turn in record.turns] == ["user", "assistant"]
        assert record.turns[0].pieces[1].strip() == "What is this?"
        assert record.turns[1].pieces == ("A cat.",)
    assert records[5].turns[1].pieces == ("A cat.",)
    assert [turn.pieces for turn in records[7].turns] == [("Call me Ishmael.",)]
    assert records[8].starts == (0, 1)
    assert set(blocks("json", README)[0].splitlines()) < set(shown.splitlines())


def picture(number: int) -> bytes:
    return encoded(Image.new("RGB", (60 + number, 40), (9 * number, 90, 200)), "JPEG")


def records_of(prefix: str, count: int = 24) -> list[dict[str, Any]]:
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A cat."}]
    return [{"image": f"{prefix}{n}.jpg", "conversations": turns} for n in range(count)]


def put_zip(path: Path, prefix: str, numbers: range) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for n in numbers:
            archive.writestr(f"{prefix}{n}.jpg", picture(n))


def put_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def lay_out_pairs(data: Path) -> None:
    put_lines(data / "x.jsonl", records_of("cats/"))
    put_zip(data / "x.zip", "cats/", range(24))


def lay_out_a_release(data: Path) -> None:
    data.mkdir()
    (data / "release.json").write_text(json.dumps(records_of("coco/train2017/")))
    put_zip(data / "images_1.zip", "train2017/", range(12))
    put_zip(data / "images_2.zip", "train2017/", range(12, 24))


def lay_out_a_folder(data: Path) -> None:
    records = [{"img_path": f"{n}.jpg", "description": "a cat"} for n in range(24)]
    put_lines(data / "folder/records.jsonl", records)
    (data / "folder/pictures").mkdir()
    for n in range(24):
        (data / f"folder/pictures/{n}.jpg").write_bytes(picture(n))


@pytest.mark.parametrize(
    ("number", "lay_out", "below"),
    [
        (0, lay_out_pairs, ""),
        (1, lay_out_pairs, "pairs"),
        (2, lay_out_a_release, ""),
        (3, lay_out_a_folder, ""),
    ],
)
def test_data_laid_out_so_are_found(
    number: int, lay_out: Any, below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "data").mkdir() if below else None
    lay_out(tmp_path / "data" / below)
    config = loaded(blocks("yaml", DATA)[number], tmp_path)
    Path(config.index_dir).mkdir(parents=True)
    report = update_index(config)
    assert (report.num_samples, report.num_rejected) == (24, 0)


def test_the_quick_start_leads_to_a_trained_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All but `serve`, in whose place the same service runs without Ray."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    lay_out_pairs(tmp_path / "data")
    config = loaded(blocks("yaml", README)[0] + "plan: {pack_length: 512}\n", tmp_path)
    for folder in (config.index_dir, config.state_dir):
        Path(folder).mkdir(parents=True)
    update_index(config)
    config = dataclasses.replace(
        config, serving=dataclasses.replace(config.serving, port=0, http_port=None)
    )
    look = blocks("python", README)[0]
    (train,) = (words for words in commands(README) if "trainer_client.examples" in str(words))
    with LocalService(config) as service:
        exec(compile(look.replace("127.0.0.1:7070", service.endpoint), "look.py", "exec"), {})
        assert "0 0 torch.Size([512])" in capsys.readouterr().out
        words = train[3:]
        words[words.index("--endpoint") + 1] = service.endpoint
        words[words.index("--checkpoint") + 1] = str(tmp_path / "cats.pt")
        train_tiny_vlm(words)
    assert re.search(r"step 0 loss [\d.]+", capsys.readouterr().out)
    assert (tmp_path / "cats.pt").is_file()


# ---- trainers ---------------------------------------------------------------------------------


class Model(TinyVLM):
    """With DDP's `no_sync`; `held_back` counts micro-batches in it."""

    held_back = 0

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        type(self).held_back += 1
        yield


def run_loop(endpoint: str, checkpoint: dict[str, Any] | None) -> tuple[Model, dict[int, Any]]:
    """The trainer's loop of the guide; the model and what was saved by step."""
    torch.manual_seed(0)
    sizes = {name: getattr(FAKE_INFO, name) for name in ModelSizes.__slots__[:6]}
    model, saved = Model(ModelSizes(**sizes, dim=16, vision_dim=16)), {}
    Model.held_back = 0
    given = {
        "endpoint": endpoint,
        "job": "readme",
        "dp_rank": 0,
        "dp_size": 1,
        "micro_steps": 4,
        "device": "cpu",
        "checkpoint": checkpoint,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2),
        "save": saved.__setitem__,
    }
    exec(compile(blocks("python", TRAINER)[0], TRAINER, "exec"), given)
    return model, saved


def test_the_trainer_loop_trains_and_resumes() -> None:
    assert blocks("python", README)[1:] == blocks("python", TRAINER)[:1]
    with FakeService(synthetic_packs(24)) as service:
        model, saved = run_loop(service.endpoint, None)
        assert list(saved) == [0, 1, 2, 3, 4, 5]
        assert Model.held_back == 6 * 3
        before, _ = run_loop(service.endpoint, saved[5])
        assert not torch.equal(model.head.weight, before.head.weight)
        _, rest = run_loop(service.endpoint, saved[3])
        assert list(rest) == [4, 5]
        assert rest[5] == saved[5]


def test_a_model_of_transformers_is_called() -> None:
    called: list[Any] = []

    def model(**inputs: Any) -> Any:
        called.append(inputs)
        return SimpleNamespace(loss=torch.zeros((), requires_grad=True))

    with (
        FakeService(synthetic_packs(4)) as service,
        PackStream(
            service.endpoint, job="readme", layout=ParallelLayout(), micro_steps=1
        ) as stream,
    ):
        given = {"stream": stream, "model": model, "dp_size": 1}
        exec(compile(blocks("python", TRAINER)[1], TRAINER, "exec"), given)
    assert len(called) == 4
    assert all(len(inputs["image_grid_thw"]) for inputs in called), "dummy images"


def test_a_trainers_own_test_runs() -> None:
    exec(compile(blocks("python", TRAINER)[2], TRAINER, "exec"), {})


def test_packs_of_another_loader_are_balanced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(blocks("python", TRAINER)) == 4
    yielded = []

    class Recorded(RebalancedLoader):
        def __next__(self) -> MicroBatch:
            yielded.append(super().__next__())
            return yielded[-1]

    monkeypatch.setattr("trainer_client.redistribute.RebalancedLoader", Recorded)
    with (
        FakeService(synthetic_packs(40)) as service,
        PackStream(service.endpoint, job="readme", layout=ParallelLayout(), micro_steps=1) as packs,
    ):
        exec(compile(blocks("python", TRAINER)[3], TRAINER, "exec"), {"packs": packs})
    assert len(yielded) == 48, "padded to whole steps of 16"
    assert len({name for batch in yielded for name in batch.meta["pack_ids"]}) >= 40


# ---- commands, links, promises ----------------------------------------------------------------


def check_command(words: list[str], guide: str, trainer: list[str]) -> None:
    """That what is called exists and takes these words; `trainer` is what $train stands for."""
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif words[0] == "dataservice":
        command = typer.main.get_command(app).commands[words[1]]  # type: ignore[attr-defined]
        with command.make_context(words[1], words[2:]):
            pass
    elif guide == DEPLOY or words[0].startswith("train="):
        pass
    elif "$train" in words:
        _arguments(trainer + words[words.index("$train") + 1 :])
    elif "trainer_client.examples.train_tiny_vlm" in words:
        _arguments(words[words.index("trainer_client.examples.train_tiny_vlm") + 1 :])
    elif any("trainer_client.examples" in word for word in words):
        # what tests/adapters runs
        assert words[0] in ("python", "torchrun")
        (module,) = (word for word in words if word.startswith("trainer_client.examples."))
        example_arguments("", words[words.index(module) + 1 :])
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file()
    elif words[:2] == ["python", "-m"]:
        assert words[2] == "trainer_client.saved_state"
    elif words[0].startswith("deploy/"):
        assert all((ROOT / word).is_file() for word in words)
    else:
        assert words[0] in ("export", "ray"), words


@pytest.mark.parametrize("guide", GUIDES)
def test_shell_commands_parse(guide: str) -> None:
    given = commands(guide)
    trainers = [words[0] for words in given if words[0].startswith("train=")]
    trainer = shlex.split(trainers[0].removeprefix("train=")) if trainers else ["", "", ""]
    assert trainer[:2] in ([], ["", ""], ["-m", "trainer_client.examples.train_tiny_vlm"])
    for words in given:
        check_command(words, guide, trainer[2:])


def test_every_command_is_shown() -> None:
    shown = {words[1] for guide in GUIDES for words in commands(guide) if words[0] == "dataservice"}
    assert shown == set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def anchors(path: Path) -> set[str]:
    """Of the headings, as they are made where the project is shown."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


LINKS = [
    (guide, target) for guide in GUIDES for target in re.findall(r"\]\(([^):]+)\)", TEXTS[guide])
]


@pytest.mark.parametrize(("guide", "target"), dict.fromkeys(LINKS))
def test_links_lead_somewhere(guide: str, target: str) -> None:
    path, _, anchor = target.partition("#")
    found = (ROOT / guide).parent / path if path else ROOT / guide
    assert found.exists()
    assert not anchor or anchor in anchors(found)


def test_messages_of_the_table_of_troubles_are_said() -> None:
    troubles = TEXTS[OPERATING].partition("## When it goes wrong")[2].partition("\n\n**")[0]
    seen = re.findall(r"^\| (.*?) \|", troubles, re.MULTILINE)[2:]
    quoted = [part for text in seen for part in re.findall(r"`([^`]* [^`]*)`", text)]
    sources = (p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))
    code = "".join(path.read_text(encoding="utf-8") for path in sources)
    said = re.sub(r'"\s+f?"', "", code)
    assert len(quoted) > 5
    for part in (part.strip() for text in quoted for part in text.split("...")):
        assert part in said, part


def test_promises_are_held_by_tests_that_exist() -> None:
    text = TEXTS[PROMISES]
    named = re.findall(r"\[`([\w/]+\.py)::(\w+)`\]\(\1\)( \*)?", text)
    assert len(named) == len(re.findall(r"`[\w/]+\.py::", text))
    assert len({path.split("/")[0] for path, _, _ in named}) > 6
    for path, test, star in named:
        source = (ROOT / "tests" / path).read_text(encoding="utf-8")
        assert re.search(rf"^(async )?def {test}\(", source, re.MULTILINE), f"{path}::{test}"
        assert not star or "mark.slow" in source, f"{path} is not slow"
    rows = re.findall(r"^\| \*\*(\d)\. .*::test_", text, re.MULTILINE)
    assert rows == list("12345678")


def test_the_readme_prints_each_promise_with_a_test_that_holds_it() -> None:
    section = TEXTS["README.md"].partition("## Promises\n")[2].partition("\n## ")[0]
    held = re.findall(r"^(\d)\. \*\*.*?\[`([\w/]+\.py::\w+)`\]", section, re.MULTILINE | re.DOTALL)
    assert [number for number, _ in held] == list("12345678")
    for number, test in held:
        row = re.search(rf"^\| \*\*{number}\. .*$", TEXTS[PROMISES], re.MULTILINE)
        assert row is not None and f"`{test}`" in row[0], test


def test_tests_named_elsewhere_exist() -> None:
    for guide in set(GUIDES) - {PROMISES}:
        for path, test in re.findall(r"`([\w/]+\.py)::(\w+)`", TEXTS[guide]):
            source = (ROOT / "tests" / path).read_text(encoding="utf-8")
            assert re.search(rf"^(async )?def {test}\(", source, re.MULTILINE), f"{path}::{test}"

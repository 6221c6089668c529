"""README.md as its readers use it: what it shows loads, parses and runs; what it names exists."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer.main

from dataservice.cli.app import app
from dataservice.config import load_config
from dataservice.storage.records import parse_record
from trainer_client import MicroBatch, PackStream, ParallelLayout
from trainer_client.examples.tiny_trainers import arguments as example_arguments
from trainer_client.examples.train_tiny_vlm import ModelSizes, TinyVLM, _arguments
from trainer_client.redistribute import RebalancedLoader
from trainer_client.testing import FAKE_INFO, FakeService, synthetic_packs

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    return [text for name, text in BLOCKS if name == language]


def commands() -> list[list[str]]:
    """Every line of the shell blocks, as words without comment and variables' values."""
    lines = "".join(blocks("bash")).splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def test_every_kind_of_block_is_looked_at_here() -> None:
    assert {name for name, _ in BLOCKS} == {"bash", "json", "python", "text", "yaml"}


def test_configs_load_and_the_long_one_is_the_example(tmp_path: Path) -> None:
    smallest, every_setting = blocks("yaml")
    for number, text in enumerate((smallest, every_setting)):
        path = tmp_path / f"{number}.yaml"
        path.write_text(text)
        assert load_config(path).sources[0].records[0].startswith(str(tmp_path))
    assert every_setting == (ROOT / "deploy/example.yaml").read_text(encoding="utf-8")


def test_records_are_read_as_the_readme_says() -> None:
    (shown,) = blocks("json")
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


class Model(TinyVLM):
    """With DDP's `no_sync`; `held_back` counts micro-batches in it."""

    held_back = 0

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        type(self).held_back += 1
        yield


def run_loop(endpoint: str, checkpoint: dict[str, Any] | None) -> tuple[Model, dict[int, Any]]:
    """The trainer's loop of the README; the model and what was saved by step."""
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
    exec(compile(blocks("python")[0], "README.md", "exec"), given)
    return model, saved


def test_the_trainer_loop_trains_and_resumes() -> None:
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
        exec(compile(blocks("python")[1], "README.md", "exec"), given)
    assert len(called) == 4
    assert all(len(inputs["image_grid_thw"]) for inputs in called), "dummy images"


def test_a_trainers_own_test_runs() -> None:
    exec(compile(blocks("python")[2], "README.md", "exec"), {})


def test_packs_of_another_loader_are_balanced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(blocks("python")) == 4
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
        exec(compile(blocks("python")[3], "README.md", "exec"), {"packs": packs})
    assert len(yielded) == 48, "padded to whole steps of 16"
    assert len({name for batch in yielded for name in batch.meta["pack_ids"]}) >= 40


def test_shell_commands_parse() -> None:
    shown: set[str] = set()
    group: Any = typer.main.get_command(app)
    trainer = next(words[0] for words in commands() if words[0].startswith("train="))
    trainer_words = shlex.split(trainer.removeprefix("train="))
    for words in commands():
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        elif words[0] == "dataservice":
            shown.add(words[1])
            with group.commands[words[1]].make_context(words[1], words[2:]):
                pass
        elif "$train" in words:
            assert trainer_words[:2] == ["-m", "trainer_client.examples.train_tiny_vlm"]
            _arguments(trainer_words[2:] + words[words.index("$train") + 1 :])
        elif any("trainer_client.examples" in word for word in words) and words[0] != trainer:
            # what tests/adapters runs
            assert words[0] in ("python", "torchrun")
            (module,) = (word for word in words if word.startswith("trainer_client.examples."))
            example_arguments("", words[words.index(module) + 1 :])
            assert (ROOT / f"{module.replace('.', '/')}.py").is_file()
        elif "trainer_client.saved_state" in words:
            assert (
                words[:2] == ["python", "-m"] and (ROOT / "trainer_client/saved_state.py").is_file()
            )
        elif words[0].startswith("deploy/"):
            assert all((ROOT / word).is_file() for word in words)
        else:
            assert words[0] in ("export", "ray", trainer), words
    assert shown == set(group.commands)


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#:]+)\)", README))
def test_links_lead_somewhere(target: str) -> None:
    assert (ROOT / target).is_file()


def test_promises_are_held_by_tests_that_exist() -> None:
    named = re.findall(r"\[`([\w/]+\.py)::(\w+)`\]\(tests/\1\)( \*)?", README)
    assert len(named) == len(re.findall(r"`[\w/]+\.py::", README))
    assert len({path.split("/")[0] for path, _, _ in named}) > 6
    for path, test, star in named:
        source = (ROOT / "tests" / path).read_text(encoding="utf-8")
        assert re.search(rf"^(async )?def {test}\(", source, re.MULTILINE), f"{path}::{test}"
        assert not star or "mark.slow" in source, f"{path} is not slow"
    rows = re.findall(r"^\| \*\*(\d)\. .*::test_", README, re.MULTILINE)
    assert rows == list("12345678")

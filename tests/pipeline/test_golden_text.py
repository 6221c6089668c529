"""Tokens equal to those of `transformers`' apply_chat_template."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from pipeline.golden_text import cases

from dataservice.pipeline.text import Rendered, TextRenderer, TextSettings
from dataservice.storage.records import Record, Turn

GOLDEN = cases.golden()
ALL = [(name, talk) for name, talks in cases.CASES.items() for talk in talks]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer's folder for each template."""
    top = tmp_path_factory.mktemp("tokenizers")
    for name in cases.CASES:
        (top / name).mkdir()
        source = (cases.FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
        (top / name / "chat_template.jinja").write_text(source, encoding="utf-8")
        (top / name / "tokenizer_config.json").write_text(json.dumps(cases.VARIABLES))
    cases.tokenizer().save(str(top / "tokenizer.json"))
    return top


def rendered(folder: Path, template: str, talk: cases.Talk, loss: str = "assistant") -> Rendered:
    """`template`: the folder's, or built in after "built in "."""
    name = template.removeprefix("built in ")
    settings = TextSettings(
        tokenizer=str(folder / "tokenizer.json"),
        template=str(folder / name) if name == template else name,
        loss=loss,  # type: ignore[arg-type]
    )
    turns = tuple(Turn(role=role, pieces=tuple(text.split("<image>"))) for role, text in talk)
    images = tuple(f"{i}.jpg" for i in range(sum(len(turn.pieces) - 1 for turn in turns)))
    record = Record(layout="messages", turns=turns, images=images)
    return TextRenderer.build(settings).render(record, cases.SIZES[: len(images)])


@pytest.mark.parametrize(("template", "talk"), ALL)
def test_equal_to_transformers(folder: Path, template: str, talk: str) -> None:
    for loss in ("assistant", "all"):
        found = rendered(folder, template, cases.CASES[template][talk], loss)
        assert found.ids.tolist() == GOLDEN[template][talk]["ids"]


@pytest.mark.parametrize("talk", cases.CASES["generation"])
def test_generation_blocks_carry_loss(folder: Path, talk: str) -> None:
    turns = cases.CASES["generation"][talk]
    found = rendered(folder, "generation", turns)
    assert found.loss.tolist() == [bool(loss) for loss in GOLDEN["generation"][talk]["loss"]]
    assert rendered(folder, "built in chatml", turns).loss.tolist() == found.loss.tolist()


@pytest.mark.parametrize("talk", cases.CASES["qwen_vl"])
def test_built_in_chatml_is_the_model_s_own(folder: Path, talk: str) -> None:
    turns = cases.CASES["qwen_vl"][talk]
    if turns[0][0] != "system":  # the model's own puts one there
        turns = [("system", "You are a helpful assistant."), *turns]
    own, built_in = rendered(folder, "qwen_vl", turns), rendered(folder, "built in chatml", turns)
    assert built_in.ids.tolist() == own.ids.tolist() == GOLDEN["qwen_vl"][talk]["ids"]
    assert built_in.loss.tolist() == own.loss.tolist()


@pytest.mark.parametrize("talk", cases.CASES["llama3"])
def test_built_in_llama3_is_the_model_s_own(folder: Path, talk: str) -> None:
    turns = cases.CASES["llama3"][talk]
    own, built_in = rendered(folder, "llama3", turns), rendered(folder, "built in llama3", turns)
    assert built_in.ids.tolist() == own.ids.tolist() == GOLDEN["llama3"][talk]["ids"]
    assert built_in.loss.tolist() == own.loss.tolist()


@pytest.mark.slow
def test_the_golden_file_is_what_transformers_gives() -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    code = "import json, make; print(json.dumps(make.made()))"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=cases.FOLDER, capture_output=True, check=True, timeout=100
    )
    fresh = json.loads(found.stdout)
    assert {name: fresh[name] for name in cases.CASES} == {n: GOLDEN[n] for n in cases.CASES}

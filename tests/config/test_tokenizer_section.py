from __future__ import annotations

from pathlib import Path

import pytest

from dataservice.config import load_config
from dataservice.config.settings import config_from_json, config_to_json
from dataservice.errors import ConfigError
from dataservice.pipeline.text_settings import TextSettings

MINIMAL = """
job: j
index_dir: i
state_dir: s
sources:
- {name: a, records: "a/*.jsonl"}
"""


def loaded(folder: Path, section: str) -> TextSettings:
    path = folder / "config.yaml"
    path.write_text(MINIMAL + f"tokenizer: {section}\n")
    config = load_config(path)
    assert config_from_json(config_to_json(config)) == config
    assert "***" not in repr(config)
    return config.text


def test_defaults(tmp_path: Path) -> None:
    assert loaded(tmp_path, "{}") == TextSettings()


def test_paths_are_below_the_config(tmp_path: Path) -> None:
    text = loaded(tmp_path, "{file: tok/tokenizer.json, template: tok/, loss: all}")
    assert text.tokenizer == f"{tmp_path}/tok/tokenizer.json"
    assert text.template == f"{tmp_path}/tok"
    for written in ("own.jinja", "./models", "/m/x.jinja"):
        found = loaded(tmp_path, f"{{template: {written}}}").template
        assert found == str((tmp_path / written).resolve())
    for name in ("plain", "chatml", "llama3"):
        assert loaded(tmp_path, f"{{template: {name}}}").template == name


def test_names_of_tokens(tmp_path: Path) -> None:
    text = loaded(
        tmp_path,
        "{image_token: <IMG_CONTEXT>, image_start: <img>, image_end: null, begin_of_text: null}",
    )
    assert text.image.names == ("<img>", "<IMG_CONTEXT>")
    assert text.text_begin is None
    llama = loaded(tmp_path, "{template: llama3}")
    assert (llama.text_begin, llama.text_end) == ("<|begin_of_text|>", "<|end_of_text|>")
    assert (text.text_begin, text.text_end) == (None, "<|endoftext|>")


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ("{template: chatlm}", r"tokenizer\.template: is none of plain, chatml, llama3, nor"),
        ("{template: models}", r"\(write \./ before a folder's name\), got 'models'"),
        ("{image_token: ''}", r"tokenizer\.image_token: .*at least 1 character, got ''"),
        ("{image_token: a, image_end: a}", "tokenizer: image_start, .* must be different tokens"),
        ("{loss: some}", r"tokenizer\.loss: should be 'assistant' or 'all', got 'some'"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, section: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        loaded(tmp_path, section)

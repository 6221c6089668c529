from __future__ import annotations

import json
from pathlib import Path

import pytest

from dataservice.errors import ConfigError
from dataservice.pipeline.template_files import read_template

TOKENS = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>", "lstrip": False},
    "pad_token": None,
    "unk_token": 3,
    "chat_template": "of the tokenizer",
    "model_max_length": 10**30,
}


def write(folder: Path, **files: object) -> str:
    """`files` without their suffix; a text is Jinja."""
    for name, content in files.items():
        if isinstance(content, str):
            (folder / f"{name}.jinja").write_text(content, encoding="utf-8")
        else:
            (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return str(folder)


def test_the_file_comes_before_the_processor_s_and_the_tokenizer_s(tmp_path: Path) -> None:
    folder = write(tmp_path, tokenizer_config=TOKENS)
    found = read_template(folder)
    assert found.source == "of the tokenizer"
    assert found.variables == {"bos_token": "<s>", "eos_token": "</s>"}
    write(tmp_path, chat_template={"chat_template": "of the processor"})
    assert read_template(folder).source == "of the processor"
    write(tmp_path, chat_template="a file of its own")
    assert read_template(folder).source == "a file of its own"
    assert read_template(f"{folder}/chat_template.jinja") == found.__class__(
        path=f"{folder}/chat_template.jinja",
        source="a file of its own",
        variables=found.variables,
    )


def test_of_several_the_default(tmp_path: Path) -> None:
    named = [{"name": "tools", "template": "a"}, {"name": "default", "template": "b"}]
    folder = write(tmp_path, tokenizer_config={"chat_template": named})
    assert read_template(folder).source == "b"
    write(tmp_path, tokenizer_config={"chat_template": named[:1]})
    with pytest.raises(ConfigError, match="none is called 'default'; save the one"):
        read_template(folder)


def test_the_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, tokenizer_config=TOKENS)
    first, second = (read_template(str(tmp_path / name)) for name in ("a", "b"))
    assert first.fingerprint == second.fingerprint
    write(tmp_path / "b", tokenizer_config={**TOKENS, "bos_token": "<b>"})
    assert read_template(str(tmp_path / "b")).fingerprint != first.fingerprint


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "has no chat template: neither chat_template.jinja nor chat_template in"),
        ({"tokenizer_config": {"chat_template": 3}}, "is not a text"),
        ({"tokenizer_config": [1]}, "is not a JSON object"),
    ],
)
def test_folders_without_a_template(tmp_path: Path, files: dict, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_template(write(tmp_path, **files))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.jinja' cannot be read: No such file"):
        read_template(str(tmp_path / "none.jinja"))
    (tmp_path / "own.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"own\.jinja' is not UTF-8"):
        read_template(str(tmp_path / "own.jinja"))
    with open(tmp_path / "own.jinja", "wb") as file:
        file.truncate((16 << 20) + 1)
    with pytest.raises(ConfigError, match=r"own\.jinja' is larger than 16 MiB"):
        read_template(str(tmp_path / "own.jinja"))
    for bad in (b"{", b"[" * 100_000):
        (tmp_path / "tokenizer_config.json").write_bytes(bad)
        with pytest.raises(ConfigError, match=r"tokenizer_config\.json' is not JSON"):
            read_template(str(tmp_path))

"""Writes golden.json: what `transformers` makes of the cases. It is no dependency; run this in an
environment of its own: pip install transformers jinja2; python tests/pipeline/golden_text/make.py

Image tokens are put in as Qwen-VL's processor does: in the text, before it is tokenised.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import transformers

sys.path.insert(0, str(Path(__file__).parent))

import cases


def made() -> dict:
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=cases.tokenizer(), **cases.VARIABLES
    )
    found: dict = {"transformers": transformers.__version__}
    for name, talks in cases.CASES.items():
        template = (cases.FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
        found[name] = {}
        for talk_name, talk in talks.items():
            messages = cases.messages(talk)
            text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
            sizes = iter(cases.SIZES)
            pieces = text.split("<|image_pad|>")
            text = pieces[0] + "".join(
                "<|image_pad|>" * next(sizes) + piece for piece in pieces[1:]
            )
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            if len(pieces) == 1:
                assert ids == list(
                    tokenizer.apply_chat_template(
                        messages, chat_template=template, return_dict=True
                    )["input_ids"]
                )
            found[name][talk_name] = {"ids": ids}
            if "{%- generation %}" in template:
                found[name][talk_name]["loss"] = tokenizer.apply_chat_template(
                    messages,
                    chat_template=template,
                    return_dict=True,
                    return_assistant_tokens_mask=True,
                )["assistant_masks"]
    return found


if __name__ == "__main__":
    text = json.dumps(made(), indent=None, separators=(",", ":"), sort_keys=True)
    cases.GOLDEN.write_text(text.replace("}},", "}},\n") + "\n", encoding="utf-8")

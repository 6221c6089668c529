"""What the golden file is about: a tokenizer, templates and talks, the same here and there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex

FOLDER = Path(__file__).parent
GOLDEN = FOLDER / "golden.json"

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)
VARIABLES = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
ADDED = ("<think>", "</think>")
"""Added tokens that a text may spell."""
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS = ("user", "assistant", "system", "\n\n", "\n\n\n", " the", "  ", " What", " bus")


def tokenizer() -> tokenizers.Tokenizer:
    """Byte-level BPE as Qwen's and Llama-3's, with a few merges: line feeds stick together."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    merges = []
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for word in _WORDS:
        ((letters, _),) = byte_level.pre_tokenize_str(word)
        done = letters[0]
        for letter in letters[1:]:
            if done + letter not in vocabulary:
                merges.append((done, letter))
                vocabulary[done + letter] = len(vocabulary)
            done += letter
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    made.normalizer = tokenizers.normalizers.NFC()
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Split(Regex(_SPLIT), "isolated"), byte_level]
    )
    made.decoder = tokenizers.decoders.ByteLevel()
    made.post_processor = tokenizers.processors.ByteLevel()
    made.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in SPECIALS])
    made.add_tokens([tokenizers.AddedToken(name, special=False) for name in ADDED])
    return made


Talk = list[tuple[str, str]]
"""(role, text with <image> where an image is)."""

PLAIN: dict[str, Talk] = {
    "one": [("user", "What is it?"), ("assistant", "A bus.")],
    "system": [("system", "Be brief."), ("user", "Sure?"), ("assistant", "Yes.")],
    "line feeds": [("user", "\n\nWhat\n\n"), ("assistant", "\nthe bus\n")],
    "spaces": [("user", "  What  "), ("assistant", "\t the \n bus  ")],
    "several": [
        ("user", "one"),
        ("assistant", "two"),
        ("user", ""),
        ("assistant", ""),
        ("user", "five \U0001f68c"),
        ("assistant", "e\u0301\u4e2d\u6587\U0001f68c"),
    ],
    "markup": [("user", "<b>&amp;</b> {{ messages }} {% raw %}"), ("assistant", "'\"\\n")],
}
THINKING: dict[str, Talk] = {
    "thought": [
        ("user", "a"),
        ("assistant", "<think>\nhm\n</think>\n\nb"),
        ("user", "c"),
        ("assistant", "<think>\n\nso\n\n</think>\n\n\nd\n"),
    ],
    "no thought": [("user", "a"), ("assistant", "b"), ("user", "<tool>x"), ("assistant", "c")],
}
PICTURES: dict[str, Talk] = {
    "first": [("user", "<image>What is it?"), ("assistant", "A bus.")],
    "between": [
        ("system", "See <image>."),
        ("user", "a <image><image>\n\nb<image>"),
        ("assistant", "\n\nc"),
    ],
}
SIZES = (3, 1, 4, 2)
"""Image tokens, by image of a talk."""

CASES: dict[str, dict[str, Talk]] = {
    "qwen_vl": {**PLAIN, **PICTURES},
    "llama3": PLAIN,
    "generation": PLAIN,
    "thinking": {**PLAIN, **THINKING},
    "mistral": {name: talk for name, talk in PLAIN.items() if name != "system"},
}


def messages(talk: Talk) -> list[dict[str, Any]]:
    """As `apply_chat_template` takes them."""
    found = []
    for role, text in talk:
        content: object = text
        if "<image>" in text:
            content = []
            for number, piece in enumerate(text.split("<image>")):
                content += [{"type": "image"}] * (number > 0)
                content += [{"type": "text", "text": piece}] * bool(piece)
        found.append({"role": role, "content": content})
    return found


def golden() -> dict[str, Any]:
    return json.loads(GOLDEN.read_text(encoding="utf-8"))

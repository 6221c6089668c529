"""How texts become tokens, as a config says it.

Invariants: "auto" and a template's name say which special tokens are needed; a name is a token's,
whatever its id.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dataservice.errors import ConfigError
from dataservice.pipeline.markup import ImageTokens
from dataservice.pipeline.templates import END_OF_TEXT, FRAMES, LLAMA3_BEGIN, LLAMA3_END

TEMPLATES = ("plain", *FRAMES)
"""Those that need no file."""
BYTE_SPECIALS = (
    END_OF_TEXT,
    *FRAMES["chatml"].special,
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    LLAMA3_END,
    *FRAMES["llama3"].special,
)
"""Those that the byte tokenizer has in any case, so that ids do not depend on the template."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSettings:
    tokenizer: str = "bytes"
    """"bytes" (UTF-8 bytes are the tokens), or the path of a Hugging Face `tokenizer.json`."""
    template: str = "chatml"
    """One of TEMPLATES, or the path of a tokenizer's folder or a .jinja file."""
    loss: Literal["assistant", "all"] = "assistant"
    """Which turns carry loss; plain text carries it in either case."""
    begin_of_text: str | None = "auto"
    """The special token before plain text; "auto": llama3's own, else None."""
    end_of_text: str = "auto"
    """The one behind it, which pads too; "auto": llama3's own, else <|endoftext|>."""
    image_token: str = "<|image_pad|>"  # noqa: S105
    """The special token that stands for an image token."""
    image_start: str | None = "<|vision_start|>"
    """Before the image tokens of an image."""
    image_end: str | None = "<|vision_end|>"

    @property
    def text_begin(self) -> str | None:
        if self.begin_of_text == "auto":
            return LLAMA3_BEGIN if self.template == "llama3" else None
        return self.begin_of_text

    @property
    def text_end(self) -> str:
        if self.end_of_text == "auto":
            return LLAMA3_END if self.template == "llama3" else END_OF_TEXT
        return self.end_of_text

    @property
    def image(self) -> ImageTokens:
        return ImageTokens(token=self.image_token, start=self.image_start, end=self.image_end)

    def special_tokens(self) -> dict[str, str]:
        """The special tokens that are needed, and the keys that name them."""
        needed = {self.text_end: "end_of_text"}
        if self.text_begin is not None:
            needed[self.text_begin] = "begin_of_text"
        if self.template in FRAMES:
            needed |= dict.fromkeys(FRAMES[self.template].special, "template")
        for key in ("image_start", "image_end", "image_token"):
            if (name := getattr(self, key)) is not None:
                needed[name] = key
        return needed

    def check(self) -> None:
        """Raises ConfigError."""
        if self.loss not in ("assistant", "all"):
            raise ConfigError(f"loss: {self.loss!r} is neither 'assistant' nor 'all'")
        image = self.image.names
        if len({*image, self.text_end}) != len(image) + 1:
            raise ConfigError(
                "image_start, image_token, image_end and end_of_text must be different "
                f"tokens, got {', '.join([*image, self.text_end])}"
            )

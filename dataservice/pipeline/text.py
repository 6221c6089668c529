"""Turns records into token ids and the mask that says which of them carry loss.

Invariants: `count` tells what `render` gives, for every record; a record's result does not depend
on the others of its batch; what the data says is always text, also where it spells a special
token; each document of a record is rendered as if it were alone; the first token of a document
never carries loss, nor does any of the tokens of an image. Text between two special tokens is
encoded as one text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dataservice.errors import ConfigError, RecordError
from dataservice.pipeline.markup import IMAGE, Markup, Part
from dataservice.pipeline.template_files import read_template
from dataservice.pipeline.templates import (
    FRAMES,
    FramedTemplate,
    PlainTemplate,
    QuickCounter,
    Template,
)
from dataservice.pipeline.text_layout import Layout, documents, is_plain, pieces_of, runs_of
from dataservice.pipeline.text_settings import BYTE_SPECIALS, TEMPLATES, TextSettings
from dataservice.pipeline.tokenizing import (
    ByteTokenizer,
    Encoded,
    FileTokenizer,
    Segment,
    Tokenizer,
)
from dataservice.storage.counting import Counted
from dataservice.storage.records import Record, Turn

__all__ = ["Rendered", "TextRenderer", "TextSettings"]

RENDER_VERSION = 2
"""Part of the fingerprint: grows whenever the same record gives other tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """A whole record."""

    ids: NDArray[np.int32]
    loss: NDArray[np.bool_]
    """True where the token's label takes part in the loss."""
    starts: tuple[int, ...] = (0,)
    """The first token of each of its documents."""
    image_docs: tuple[int, ...] = ()
    """By image: the number of the document that it stands in."""


class TextRenderer:
    """Thread-safe; two renderers with the same fingerprint give the same tokens."""

    def __init__(
        self,
        settings: TextSettings,
        tokenizer: Tokenizer,
        template: Template | None,
        fingerprint: str,
    ) -> None:
        """`template` is that of turns; None: they are plain text."""
        special = {name: token.id for name, token in tokenizer.special.items()}
        image = settings.image
        self.settings = settings
        self.fingerprint = fingerprint
        self.vocab_size = tokenizer.vocab_size
        self.pad_token = special[settings.text_end]
        self.image_token = special[image.token]
        self.image_start = None if image.start is None else special[image.start]
        self.image_end = None if image.end is None else special[image.end]
        self._tokenizer = tokenizer
        self._image_markup = len(image.names) - 1
        begin = settings.text_begin
        self._plain = PlainTemplate(
            () if begin is None else (special[begin],),
            (self.pad_token,),
            everywhere=settings.loss == "all",
        )
        self._chat = template
        self._quick_chat = None
        if isinstance(template, FramedTemplate) and tokenizer.additive:
            self._quick_chat = template.counter(tokenizer.count_text, self._image_markup)

    @classmethod
    def build(cls, settings: TextSettings) -> TextRenderer:
        """Raises ConfigError for a tokenizer or template that is missing, cannot be used or does
        not fit the other."""
        settings.check()
        tokenizer = _tokenizer(settings)
        covered = {**asdict(settings), "tokenizer": tokenizer.fingerprint}
        template: Template | None = None
        if settings.template != "plain":
            markup = Markup(tokenizer.special, settings.image)
            everywhere = settings.loss == "all"
            if settings.template in FRAMES:
                frame = FRAMES[settings.template]
                template = FramedTemplate(frame, markup, everywhere=everywhere)
            else:
                if not tokenizer.alone:
                    raise ConfigError(
                        f"tokenizer.template: {settings.tokenizer!r} encodes a text otherwise "
                        "behind a special token than alone, and would not give this template's "
                        f"tokens; use one of {', '.join(TEMPLATES)}, or another tokenizer"
                    )
                from dataservice.pipeline.jinja_template import JinjaTemplate

                file = read_template(settings.template)
                template = JinjaTemplate(file, markup, everywhere=everywhere)
                covered["template"] = file.fingerprint
        text = json.dumps([RENDER_VERSION, covered], sort_keys=True)
        fingerprint = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
        return cls(settings, tokenizer, template, fingerprint)

    @property
    def special_tokens(self) -> dict[str, int]:
        return {name: token.id for name, token in self._tokenizer.special.items()}

    def count(self, record: Record) -> Counted:
        """Raises RecordError as `render` does."""
        return _one(self.count_all([record]))

    def count_all(self, records: Sequence[Record]) -> list[Counted | RecordError]:
        """`storage.counting.RecordCounter`."""
        if self._tokenizer.additive:
            return [self._or_error(self._count_quickly, record) for record in records]
        segments: list[Segment] = []
        layouts = [self._lay_out(record, segments) for record in records]
        lengths = self._tokenizer.count(segments)
        return [
            layout if isinstance(layout, RecordError) else self._counted(layout, segments, lengths)
            for layout in layouts
        ]

    def render(self, record: Record, image_tokens: Sequence[int]) -> Rendered:
        """`image_tokens[i]` is the number of image tokens of the record's image i.

        Raises RecordError for text that is not valid Unicode, with another number of places than
        of images, or that the template refuses; ValueError for another number of sizes than of
        images.
        """
        return _one(self.render_all([(record, image_tokens)]))

    def render_all(
        self, records: Sequence[tuple[Record, Sequence[int]]]
    ) -> list[Rendered | RecordError]:
        """As `render`, of records with the sizes of their images; tokenised together."""
        segments: list[Segment] = []
        layouts = []
        for record, sizes in records:
            if len(sizes) != len(record.images):
                raise ValueError(f"{len(sizes)} sizes for {len(record.images)} images")
            layouts.append(self._lay_out(record, segments))
        encoded = self._tokenizer.encode(segments)
        return [
            layout
            if isinstance(layout, RecordError)
            else self._rendered(layout, segments, sizes, encoded)
            for layout, (_, sizes) in zip(layouts, records, strict=True)
        ]

    def decode(self, ids: Sequence[int] | NDArray[np.int32]) -> str:
        """The text of ids, special tokens by their names."""
        return self._tokenizer.decode([int(i) for i in ids])

    def _parts(self, turns: Sequence[Turn]) -> list[Part]:
        """Of one document; never none."""
        if self._chat is None or is_plain(turns):
            return self._plain.parts(turns)
        return self._chat.parts(turns)

    def _lay_out(self, record: Record, segments: list[Segment]) -> Layout | RecordError:
        """Adds the record's segments to those of the batch."""
        found: list[Segment] = []
        try:
            _check_images(record)
            layout = [
                pieces_of(self._parts(turns), found, len(segments)) for turns in documents(record)
            ]
            for segment in found:
                for text, _ in segment:
                    text.encode()
        except UnicodeEncodeError as error:
            return _not_unicode(error)
        except RecordError as error:
            return error
        segments += found
        return layout

    def _counted(
        self, layout: Layout, segments: Sequence[Segment], lengths: Sequence[tuple[int, ...]]
    ) -> Counted | RecordError:
        num_tokens = num_loss = 0
        positions: list[int] = []
        for pieces in layout:
            unseen = True  # the first token carries none
            for piece in pieces:
                if piece is None:
                    positions.append(num_tokens)
                    num_tokens += self._image_markup
                    unseen = False
                    continue
                for length, loss in runs_of(piece, segments, lengths):
                    if length:
                        num_tokens += length
                        num_loss += (length - unseen) * loss
                        unseen = False
            if unseen:
                return _nothing()
        return Counted(
            text_tokens=num_tokens,
            loss_tokens=num_loss,
            image_positions=tuple(positions),
            image_markup=self._image_markup,
            num_docs=len(layout),
        )

    def _rendered(
        self,
        layout: Layout,
        segments: Sequence[Segment],
        image_tokens: Sequence[int],
        encoded: Sequence[Encoded],
    ) -> Rendered | RecordError:
        sizes = iter(image_tokens)
        ids: list[NDArray[np.int32]] = []
        lengths: list[int] = []
        losses: list[bool] = []
        image_docs: list[int] = []
        starts = [0]
        for number, pieces in enumerate(layout):
            first = len(lengths)
            for piece in pieces:
                if piece is None:
                    part = self._image_ids(next(sizes))
                    image_docs.append(number)
                    lengths.append(len(part))
                    losses.append(False)
                elif isinstance(piece, int):
                    part = encoded[piece].ids
                    lengths += encoded[piece].lengths
                    losses += [loss for _, loss in segments[piece]]
                else:
                    part = np.array(piece[0], np.int32)
                    lengths.append(len(part))
                    losses.append(piece[1])
                ids.append(part)
            starts.append(starts[-1] + sum(lengths[first:]))
            if starts[-1] == starts[-2]:
                return _nothing()
        loss_mask = np.repeat(np.array(losses, np.bool_), lengths)
        loss_mask[starts[:-1]] = False
        return Rendered(
            ids=np.concatenate(ids),
            loss=loss_mask,
            starts=tuple(starts[:-1]),
            image_docs=tuple(image_docs),
        )

    def _image_ids(self, num_image_tokens: int) -> NDArray[np.int32]:
        ids = np.full(num_image_tokens + self._image_markup, self.image_token, np.int32)
        if self.image_start is not None:
            ids[0] = self.image_start
        if self.image_end is not None:
            ids[-1] = self.image_end
        return ids

    def _count_quickly(self, record: Record) -> Counted:
        """As `count_all`, of a tokenizer that is additive."""
        _check_images(record)
        num_tokens = num_loss = 0
        positions: list[int] = []
        parts = documents(record)
        for turns in parts:
            count: QuickCounter = self._count_parts
            if self._quick_chat is not None and not is_plain(turns):
                count = self._quick_chat
            num_tokens, loss = count(turns, num_tokens, positions)
            num_loss += loss
        return Counted(
            text_tokens=num_tokens,
            loss_tokens=num_loss,
            image_positions=tuple(positions),
            image_markup=self._image_markup,
            num_docs=len(parts),
        )

    def _count_parts(
        self, turns: Sequence[Turn], num_tokens: int, positions: list[int]
    ) -> tuple[int, int]:
        """`templates.QuickCounter`, of any template."""
        parts = self._parts(turns)
        num_loss = -parts[0][1]  # the first token carries none
        for what, loss in parts:
            if isinstance(what, str):
                size = self._tokenizer.count_text(what)
            elif what == IMAGE:
                positions.append(num_tokens)
                size = self._image_markup
            else:
                size = len(what)
            num_tokens += size
            if loss:
                num_loss += size
        return num_tokens, num_loss

    @staticmethod
    def _or_error(count: Callable[[Record], Counted], record: Record) -> Counted | RecordError:
        try:
            return count(record)
        except UnicodeEncodeError as error:
            return _not_unicode(error)
        except RecordError as error:
            return error


_R = TypeVar("_R", Counted, Rendered)


def _one(results: Sequence[_R | RecordError]) -> _R:
    (result,) = results
    if isinstance(result, RecordError):
        raise result
    return result


def _tokenizer(settings: TextSettings) -> Tokenizer:
    needed = settings.special_tokens()
    if settings.tokenizer != "bytes":
        return FileTokenizer(settings.tokenizer, needed)
    return ByteTokenizer(tuple(dict.fromkeys([*BYTE_SPECIALS, *needed])))


def _check_images(record: Record) -> None:
    places = 0
    for turn in record.turns:
        places += len(turn.pieces) - 1
    if places != len(record.images):
        raise RecordError(f"{places} places in the text, but {len(record.images)} images")


def _not_unicode(error: UnicodeEncodeError) -> RecordError:
    return RecordError(f"text is not valid Unicode: {error}")


def _nothing() -> RecordError:
    return RecordError("a document of the record has no tokens")

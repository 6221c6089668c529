"""What a source says about its records: placeholders, other names, sizes, images in the record."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from storage.parsing import llava, parse, pieces

from dataservice.errors import ConfigError, ImageError, RecordError
from dataservice.storage.records import (
    MAX_IMAGES,
    MAX_INLINE_BYTES,
    Record,
    RecordReader,
    Turn,
    decode_data_uri,
    inline_image,
)
from dataservice.storage.sources import RecordFormat


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (llava(question="<image><image>", image="a"), "2 placeholders '<image>', 1 image"),
        (llava(question="<image>", images=["a", "b"]), "1 placeholder '<image>', 2 images"),
        (llava(image="a"), "no placeholders '<image>', 1 image; `mismatch: front` of the source"),
        (llava(question="<image>"), "1 placeholder '<image>', no images"),
        ({"text": "<image>"}, "1 placeholder '<image>', no images"),
        ({"caption": "<image> <image>", "image": "a"}, "2 placeholders '<image>', 1 image"),
    ],
)
@pytest.mark.parametrize("mismatch", ["reject", "front"])
def test_placeholders_and_images_must_agree(record: Any, reason: str, mismatch: str) -> None:
    if mismatch == "front" and reason.startswith("no"):
        assert pieces(parse(record, mismatch="front"))[0] == ("", "Hi.")
        return
    with pytest.raises(RecordError, match=reason):
        parse(record, mismatch=mismatch)


def test_in_front_means_of_the_first_turn_of_the_user() -> None:
    turns = [{"from": who, "value": who} for who in ("system", "human", "gpt")]
    record = parse({"conversations": turns, "image": "a"}, mismatch="front")
    assert pieces(record) == [("system",), ("", "human"), ("gpt",)]
    record = parse({"conversations": turns[2:], "image": "a"}, mismatch="front")
    assert pieces(record) == [("", "gpt")]
    with pytest.raises(RecordError, match=r"no placeholders '<image>', 2 images$"):
        parse({"conversations": turns, "image": ["a", "b"]}, mismatch="front")
    bare = [{"role": "user", "content": [{"type": "text", "text": "Hi."}]}]
    assert pieces(parse({"messages": bare, "image": "a"}, mismatch="front")) == [("", "Hi.")]


def test_other_placeholders() -> None:
    record = llava(question="<img> and <image>", image="a")
    assert pieces(parse(record, placeholders=("<img>",)))[0] == ("", " and <image>")
    record = llava(question="<img> and <image>.<img", images=["a", "b"])
    both = parse(record, placeholders=("<img>", "<image>"))
    assert pieces(both)[0] == ("", " and ", ".<img") and both.images == ("a", "b")
    with pytest.raises(RecordError, match="no placeholders '<a>' or '<b>', 2 images"):
        parse(record, placeholders=("<a>", "<b>"))
    longest = parse(llava(question="<i><i><i>x", image="a"), placeholders=("<i>", "<i><i><i>"))
    assert pieces(longest)[0] == ("", "x")


def test_numbered_placeholders_take_the_image_of_their_number() -> None:
    sizes = {"width_list": [10, 20, 30], "height_list": [1, 2, 3]}
    record = llava(question="<image_3>, <image_01>", images=["a", "b", "c"], **sizes)
    record["conversations"][1]["value"] = "not <image_2>, <image_x>, <image>"  # type: ignore[index]
    found = parse(record, placeholders=("<image_{n}>",))
    assert found.images == ("c", "a", "b")
    assert found.sizes == ((30, 3), (10, 1), (20, 2))
    assert pieces(found) == [("", ", ", ""), ("not ", ", <image_x>, <image>")]


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        ("<image_1><image_3>", "the number 3, but images are numbered from 1 to 2"),
        ("<image_0><image_1>", "the number 0, but images are numbered from 1 to 2"),
        ("<image_1><image_1>", "image 1 has two placeholders"),
        ("<image_1>", "1 placeholder '<image_{n}>' or '<image>', 2 images"),
        (f"<image_1><image_{'9' * 5000}>", "the number 1000000001, but"),
        ("<image_1><image>", "image 1 has two placeholders"),
    ],
)
def test_numbers_that_do_not_fit(question: str, reason: str) -> None:
    with pytest.raises(RecordError, match=reason):
        parse(llava(question=question, images=["a", "b"]), placeholders=("<image_{n}>", "<image>"))


def test_numbered_and_plain_placeholders_mix() -> None:
    record = llava(question="<image> then <image_2>", images=["a", "b"])
    assert parse(record, placeholders=("<image_{n}>", "<image>")).images == ("a", "b")


def test_field_names_of_the_source() -> None:
    names = (
        ("conversations", "talk"),
        ("image", "img_path"),
        ("from", "who"),
        ("value", "says"),
        ("width", "w"),
    )
    talk = [{"who": "Q", "says": "<image>?"}, {"who": "gpt", "says": "x", "value": "ignored"}]
    record = {"talk": talk, "img_path": "a", "image": "ignored", "w": 7, "height": 5}
    found = parse(record, fields=names, roles=(("Q", "user"),))
    assert found == Record(
        layout="llava",
        turns=(Turn(role="user", pieces=("", "?")), Turn(role="assistant", pieces=("x",))),
        images=("a",),
        sizes=((7, 5),),
    )
    with pytest.raises(RecordError, match=r"'talk\[0\].who' must be one of .*, not 'Q'"):
        parse(record, fields=names)
    with pytest.raises(RecordError, match=r"'talk\[0\].says' is missing"):
        parse({**record, "talk": [{"who": "gpt"}]}, fields=names)
    with pytest.raises(RecordError, match="none of the fields 'talk', 'messages'"):
        parse({"conversations": talk}, fields=names)


def test_a_name_that_one_field_took_over_is_no_longer_anothers() -> None:
    record = parse({"text": "A cat.", "file": "a"}, fields=(("caption", "text"), ("image", "file")))
    assert record.layout == "caption" and record.images == ("a",)
    with pytest.raises(RecordError, match="field 'text' is missing"):
        parse({"text": "A cat."}, fields=(("caption", "text"),), layout="text")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"layout": "obelisk"}, "layout: 'obelisk' is unknown; known are auto, llava, messages"),
        ({"fields": (("imagee", "x"),)}, "fields: no layout has a field 'imagee'; known are"),
        ({"fields": (("text", "x"), ("image", "x"))}, "fields: text and image are both 'x'"),
        ({"roles": (("Q", "questioner"),)}, "roles: 'Q' is 'questioner'; give system, user"),
        ({"placeholders": ("<image>", "")}, "placeholder: is empty"),
        ({"placeholders": ("{n}{n}",)}, r"placeholder: '\{n\}\{n\}' holds \{n\} more than once"),
    ],
)
def test_formats_that_say_something_unknown(options: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        RecordReader(RecordFormat(**options))


@pytest.mark.parametrize(
    ("fields", "sizes"),
    [
        ({"width": 640, "height": 480}, ((640, 480),)),
        ({"width": 640.0, "height": 480}, ((640, 480),)),
        ({"width_list": [640], "height_list": [480]}, ((640, 480),)),
        ({"width": 640}, (None,)),
        ({"width": 0, "height": 480}, (None,)),
        ({"width": 640.5, "height": 480}, (None,)),
        ({"width": "640", "height": 480}, (None,)),
        ({"width": True, "height": 480}, (None,)),
        ({"width": 10**30, "height": 480}, (None,)),
        ({"width": 65_536, "height": 480}, (None,)),
        ({"width": {"a": 1}, "height": 480}, (None,)),
        ({"width_list": [640, 2], "height_list": [480, 2]}, (None,)),
        ({"width_list": 640, "height_list": [480]}, (None,)),
    ],
)
def test_sizes_are_believed_when_they_can_be(fields: dict[str, Any], sizes: Any) -> None:
    assert parse(llava(question="<image>", image="a", **fields)).sizes == sizes


def test_sizes_by_image() -> None:
    both = {"question": "<image><image>", "images": ["a", "b"]}
    lists = {"width_list": [1, None], "height_list": [2, 3]}
    assert parse(llava(**both, **lists)).sizes == ((1, 2), None)
    assert parse(llava(**both, width=3, height=4)).sizes == (None, None)
    obelics = {"images": ["a", None, "b"], "texts": [None, "t", None], **lists}
    assert parse(obelics).sizes == ((1, 2), None)
    content = [{"type": "image", "image": "x"}, {"type": "image"}]
    mixed = {"messages": [{"role": "user", "content": content}], "image": "a"}
    assert parse({**mixed, "width": 5, "height": 6}).sizes == (None, (5, 6))
    assert parse(llava(width=3, height=4)).sizes == ()


PNG = b"\x89PNG\r\n\x1a\n not really"
URI = "data:image/png;base64," + base64.b64encode(PNG).decode()
OPEN = RecordFormat(data_uris=True)


def test_data_uris_by_option_only() -> None:
    record = llava(question="<image><image>", images=[URI, "b.png"])
    with pytest.raises(RecordError, match=r"'images\[0\]' holds the image itself.*data_uris: true"):
        parse(record)
    found = parse(record, data_uris=True)
    assert found.images == (URI, "b.png")
    content = [{"type": "image_url", "image_url": {"url": URI}}]
    assert parse({"messages": [{"role": "user", "content": content}]}, data_uris=True).images == (
        URI,
    )


def test_inline_image() -> None:
    line = b'{"text": "<image><image>", "images": ["b.png", "%s"]}' % URI.encode()
    assert inline_image(line, OPEN, 1) == PNG == decode_data_uri(URI)
    for number in (-1, 0, 2):
        with pytest.raises(ImageError, match=f"image {number} of the record does not stand in it"):
            inline_image(line, OPEN, number)
    with pytest.raises(RecordError, match="data_uris: true"):
        inline_image(line, RecordFormat(), 1)


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("data:image/png;base64", "without a comma"),
        ("data:text/html;base64,AAAA", "of the type 'text/html', not of an image"),
        ("data:,AAAA", "of the type ''"),
        ("data:image/png,%89PNG", "not base64"),
        ("data:image/png;base64,AAA", "base64 is damaged"),
        ("data:image/png;base64,AA==AA\n", "base64 is damaged"),
        ("data:image/png;base64,ä", "base64 is damaged"),
        ("data:image/png;base64," + "A" * (MAX_INLINE_BYTES // 3 * 4 + 8), "of more than"),
    ],
)
def test_data_uris_that_are_no_image(uri: str, reason: str) -> None:
    with pytest.raises(ImageError, match=reason) as caught:
        decode_data_uri(uri)
    assert len(str(caught.value)) < 200


def test_other_ways_to_write_a_data_uri() -> None:
    assert decode_data_uri("data:Image/PNG;charset=x; BASE64,AAAA") == b"\0\0\0"


def test_so_many_images() -> None:
    text = "<image>" * 3000
    names = [f"{number}.png" for number in range(3000)]
    record = parse(llava(question=text, images=names))
    assert record.images == tuple(names) and len(record.turns[0].pieces) == 3001
    many = MAX_IMAGES + 1
    with pytest.raises(RecordError, match=f"{many} images, more than {MAX_IMAGES}"):
        parse(llava(question="<image>" * many, images=["a"] * many))

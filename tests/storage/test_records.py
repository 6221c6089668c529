"""The layouts that records are told apart by, and what is said about those that cannot be read."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from storage.parsing import llava, parse, pieces

from dataservice.errors import RecordError
from dataservice.storage.records import Record, Turn


@pytest.mark.parametrize("images", ["a.png", ["a.png"], {"path": "a.png", "bytes": None}])
def test_llava(images: object) -> None:
    record = parse(llava(question="<image>\nWhat is it?", image=images))
    assert record == Record(
        layout="llava",
        turns=(
            Turn(role="user", pieces=("", "\nWhat is it?")),
            Turn(role="assistant", pieces=("A bus.",)),
        ),
        images=("a.png",),
        starts=(0,),
        sizes=(None,),
    )


@pytest.mark.parametrize("fields", [{}, {"image": None}, {"image": ""}, {"image": []}])
def test_ways_to_say_no_image(fields: dict[str, object]) -> None:
    assert parse(llava(**fields)).images == ()
    assert parse(llava(**fields, images=["a"], question="<image>")).images == ("a",)


def test_messages_in_both_spellings_are_one_record() -> None:
    answer = {"role": "assistant", "content": "Stop."}
    plain = {"messages": [{"role": "user", "content": "<image>Read it."}, answer]}
    text = {"type": "text", "text": "Read it."}
    expected = parse({**plain, "images": ["a.png"]})
    assert expected.layout == "messages" and expected.images == ("a.png",)
    for part in (
        {"type": "image", "image": "a.png"},
        {"type": "image", "path": "a.png", "text": None},
        {"type": "image", "url": "a.png", "detail": {"any": [1]}},
        {"type": "image_url", "image_url": {"url": "a.png"}},
        {"type": "image_url", "image_url": "a.png"},
    ):
        assert parse({"messages": [{"role": "user", "content": [part, text]}, answer]}) == expected
    bare = {"messages": [{"role": "user", "content": [{"type": "image"}, text]}, answer]}
    assert parse({**bare, "images": ["a.png"]}) == expected


@pytest.mark.parametrize("field", ["conversations", "messages"])
def test_turns_are_spelled_either_way_under_either_name(field: str) -> None:
    ways = [
        [{"from": "human", "value": "Hi."}, {"from": "gpt", "value": "Ho."}],
        [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Ho."}],
    ]
    first, second = (parse({field: turns}) for turns in ways)
    assert first == second
    assert first.layout == {"conversations": "llava", "messages": "messages"}[field]


def test_named_and_listed_images_keep_the_order_of_their_places() -> None:
    content = [
        {"type": "text", "text": "<image>"},
        {"type": "image", "image": "b.png"},
        {"type": "text", "text": "one"},
        {"type": "text", "text": " word"},
        {"type": "image"},
    ]
    record = parse({"messages": [{"role": "user", "content": content}], "images": ["a", "c"]})
    assert record.images == ("a", "b.png", "c")
    assert pieces(record) == [("", "", "one word", "")]


def test_what_parts_join_to_is_text() -> None:
    content = [{"type": "text", "text": "<im"}, {"type": "text", "text": "age>"}]
    assert pieces(parse({"messages": [{"role": "user", "content": content}]})) == [("<image>",)]


def test_text_and_roles() -> None:
    assert parse({"text": "one\n"}).turns == (Turn(role="text", pieces=("one\n",)),)
    roles = ["system", "human", "function_call", "observation", "tool", "gpt"]
    record = parse({"messages": [{"role": role, "content": ""} for role in roles]})
    assert [turn.role for turn in record.turns] == [
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]


def test_obelics() -> None:
    record = parse(
        {
            "images": ["u1.jpg", None, None, "u2.jpg", {"path": "u3.jpg"}],
            "texts": [None, "A dog runs.", "So does <image> here.", None, None],
            "metadata": '[{"alt": "dog"}, null]',
            "general_metadata": "{}",
        }
    )
    assert record.layout == "obelics"
    assert record.images == ("u1.jpg", "u2.jpg", "u3.jpg")
    assert record.turns == (
        Turn(role="text", pieces=("", "A dog runs.\n\nSo does <image> here.", "", "")),
    )


def test_mmc4_puts_an_image_before_its_sentence() -> None:
    infos = [
        {"image_name": "b.png", "raw_url": "u", "matched_text_index": 1, "matched_sim": 0.27},
        {"image_name": "c.png", "matched_text_index": 3},
        {"image_name": "a.png", "matched_text_index": 1},
    ]
    record = parse(
        {
            "url": "u",
            "text_list": ["A.", "B.", "C.", "D."],
            "image_info": infos,
            "similarity_matrix": [[0.1, 0.27]],
        }
    )
    assert record.layout == "mmc4"
    assert record.images == ("b.png", "a.png", "c.png")
    assert pieces(record) == [("A.", "", "B. C.", "D.")]
    assert parse({"text_list": ["A.", "B."], "image_info": None}).turns[0].pieces == ("A. B.",)


def test_finevision_puts_images_in_front() -> None:
    turns = [{"user": "What?", "assistant": "A cat."}, {"user": "Sure?", "assistant": "Yes."}]
    record = parse({"images": ["a.png", "b.png"], "texts": turns, "relevance_ratings": [4, 2]})
    assert record.layout == "finevision"
    assert [turn.role for turn in record.turns] == ["user", "assistant"] * 2
    assert pieces(record) == [("", "", "What?"), ("A cat.",), ("Sure?",), ("Yes.",)]
    assert parse({"images": None, "texts": turns}).images == ()
    turns[1]["user"] = "<image> and <image>?"
    assert pieces(parse({"images": ["a", "b"], "texts": turns}))[2] == ("", " and ", "?")


def test_caption() -> None:
    record = parse({"image": "a.jpg", "caption": "A cat."})
    assert record.layout == "caption" and record.images == ("a.jpg",)
    assert record.turns == (Turn(role="text", pieces=("", "A cat.")),)
    for fields in ({"images": ["a.jpg"]}, {"image_name": "a.jpg"}, {"url": "u", "key": "a"}):
        parsed = parse({"caption": "A cat.", **fields})
        assert parsed.keyed == ("key" in fields)
        assert replace(parsed, keyed=False) == record


def test_img2dataset() -> None:
    record = {
        "caption": "A cat.",
        "url": "https://example.org/1.jpg",
        "key": "000000007",
        "status": "success",
        "error_message": None,
        "width": 256,
        "height": 170,
        "original_width": 800,
    }
    assert parse(record).images == ("000000007.jpg",)
    assert parse(record).sizes == ((256, 170),)
    with pytest.raises(RecordError, match=r"'status' is 'failed_to_download'.*not fetched"):
        parse({**record, "status": "failed_to_download", "width": None})
    failed = {"status": "failed_to_download", "error_message": "HTTP Error 404: Not Found"}
    reason = "'status' is 'failed_to_download', .*not fetched: 'HTTP Error 404: Not Found'$"
    uncaptioned = {field: value for field, value in record.items() if field != "caption"}
    for given in (record, {**record, "caption": None}, uncaptioned):
        with pytest.raises(RecordError, match=reason):
            parse({**given, **failed})
    with pytest.raises(RecordError, match=reason):
        parse({**uncaptioned, **failed}, layout="caption")
    with pytest.raises(RecordError, match="field 'caption' must be a string, not null"):
        parse({**record, "caption": None})


def test_a_list_of_records_stays_together() -> None:
    one = llava(question="<image> One?", image="a.png", width=3, height=4)
    two = llava(question="Two: <image><image>", images=["b.png", "c.png"])
    record = parse([one, llava(), two])
    assert record.layout == "llava"
    assert record.starts == (0, 2, 4)
    assert [turn.pieces[0] for turn in record.turns[::2]] == ["", "Hi.", "Two: "]
    assert record.images == ("a.png", "b.png", "c.png")
    assert record.sizes == ((3, 4), None, None)
    assert parse([one]) == parse(one)


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        ([], "must hold a record, but is empty"),
        (["a", "list"], "record 0 of a list must be a JSON object, not a string"),
        ([[llava()]], "record 0 of a list must be a JSON object, not a list"),
        ([llava(), {"text": "a"}], "record 1 of a list has the layout text, the first has llava"),
        ([llava(), llava(image=5)], "record 1 of a list: field 'image' must be a string or a list"),
    ],
)
def test_lists_that_are_no_record(records: object, reason: str) -> None:
    with pytest.raises(RecordError, match=reason):
        parse(records)


@pytest.mark.parametrize("field", ["video", "videos", "audio", "audios"])
def test_video_and_audio_are_rejected_as_such(field: str) -> None:
    medium = field.removesuffix("s")
    with pytest.raises(RecordError, match=f"field '{field}': {medium} is not supported"):
        parse(llava(**{field: "a.mp4"}))
    for nothing in (None, "", []):
        assert parse(llava(**{field: nothing})) == parse(llava())
    for kind in (medium, f"{medium}_url", f"input_{medium}"):
        content = [{"type": "text", "text": "x"}, {"type": kind, kind: "a.mp4"}]
        with pytest.raises(RecordError, match=rf"content\[1\]': {medium} is not supported"):
            parse({"messages": [{"role": "user", "content": content}]})


def test_order_of_the_layouts() -> None:
    record = llava(text="t", caption="c", messages=[], texts=[])
    assert parse(record).layout == "llava"
    assert parse(record, layout="text").layout == "text"
    with pytest.raises(RecordError, match="'messages' must hold turns"):
        parse(record, layout="messages")
    with pytest.raises(RecordError, match="'text_list' is missing"):
        parse(record, layout="mmc4")


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (None, "must be a JSON object, not null"),
        (3, "must be a JSON object, not a number"),
        ("text", "must be a JSON object, not a string"),
        ({"id": 1}, "none of the fields 'conversations', 'messages', 'texts', .*, 'text'"),
        (llava(image=5), "field 'image' must be a string or a list, not a number"),
        (llava(image={"a": 1}), "field 'image' must be a file name, not an object"),
        (llava(images=["a", ""]), r"field 'images\[1\]' must be a file name, not an empty string"),
        (llava(images=[None]), r"field 'images\[0\]' must be a file name, not null"),
        (llava(image="a" * 5000), "must be a file name, not 5000 characters"),
        (llava(image="a", images=["b"]), "both fields 'image' and 'images'"),
        ({"conversations": "hello"}, "field 'conversations' must be a list of turns"),
        ({"conversations": []}, "field 'conversations' must hold turns, but is empty"),
        ({"conversations": [["human"]]}, r"'conversations\[0\]' must be an object, not a list"),
        ({"conversations": [{"from": "gpt"}]}, r"field 'conversations\[0\].value' is missing"),
        ({"conversations": [{"value": "x"}]}, r"field 'conversations\[0\].from' is missing"),
        ({"messages": [{"role": "user"}]}, r"field 'messages\[0\].content' is missing"),
        ({"messages": [{"content": "x"}]}, r"field 'messages\[0\].role' is missing"),
        (
            {"conversations": [{"from": "gpt", "value": None}]},
            r"'conversations\[0\].value' must be a string or a list, not null",
        ),
        ({"conversations": [{"from": "me", "value": ""}]}, "must be one of system, user.*'me'"),
        ({"messages": [{"role": True, "content": ""}]}, "not a boolean"),
        ({"messages": [{"role": "user", "content": [1]}]}, r"content\[0\]' must be an object"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "text' is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "image or image_url"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            r"content\[0\].image_url.url' must be a file name, not null",
        ),
        ({"text": 1}, "field 'text' must be a string, not a number"),
        ({"caption": ["a"], "image": "a"}, "field 'caption' must be a string, not a list"),
        ({"caption": "a"}, "a caption without an image: none of the fields 'image', 'image_name'"),
        ({"texts": []}, "field 'texts' must hold texts"),
        ({"texts": ["a"]}, "field 'images' is missing"),
        ({"texts": ["a"], "images": [None, None]}, "must be equally long, not 1 and 2"),
        ({"texts": ["a"], "images": ["b"]}, r"one of 'texts\[0\]' and .* must be null, neither is"),
        ({"texts": [None], "images": [None]}, "must be null, both are"),
        ({"texts": [1], "images": [None]}, r"'texts\[0\]' must be a string or null, not a number"),
        ({"texts": [{"user": "a"}]}, r"field 'texts\[0\].assistant' is missing"),
        ({"texts": [{"user": "a", "assistant": 1}]}, "assistant' must be a string, not a number"),
        ({"texts": [{"user": "a", "assistant": ""}, "a"]}, r"'texts\[1\]' must be an object"),
        ({"text_list": ["a", 1]}, r"field 'text_list\[1\]' must be a string, not a number"),
        ({"text_list": ["a"], "image_info": {}}, "field 'image_info' must be a list, not an obj"),
        ({"text_list": ["a"], "image_info": [1]}, r"field 'image_info\[0\]' must be an object"),
        (
            {"text_list": ["a"], "image_info": [{"matched_text_index": 0}]},
            r"'image_info\[0\].image_name' is missing",
        ),
        *(
            (
                {"text_list": ["a"], "image_info": [{"image_name": "a", "matched_text_index": i}]},
                rf"matched_text_index' must be the number of a sentence from 0 to 0, not {said}",
            )
            for i, said in ((1, "1"), (-1, "-1"), (0.5, "a number"), (None, "null"))
        ),
    ],
)
def test_what_is_wrong_is_named(record: object, reason: str) -> None:
    with pytest.raises(RecordError, match=reason):
        parse(record)

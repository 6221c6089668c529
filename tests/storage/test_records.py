from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.errors import RecordError
from dataservice.storage.records import Record, Turn, parse_record


def parse(record: object, **options: str) -> Record:
    return parse_record(json.dumps(record).encode(), **options)


def llava(*, question: str = "Hi.", **fields: object) -> dict[str, object]:
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": "A bus."}]
    return {"id": 7, "conversations": turns, **fields}


@pytest.mark.parametrize("images", ["a.png", ["a.png"]])
def test_llava(images: object) -> None:
    record = parse(llava(question="<image>\nWhat is it?", image=images))
    assert record == Record(
        layout="llava",
        turns=(
            Turn(role="user", text="<image>\nWhat is it?"),
            Turn(role="assistant", text="A bus."),
        ),
        images=("a.png",),
    )


@pytest.mark.parametrize("fields", [{}, {"image": None}, {"image": ""}, {"image": []}])
def test_ways_to_say_no_image(fields: dict[str, object]) -> None:
    assert parse(llava(**fields)).images == ()


def test_messages_in_both_spellings_are_one_record() -> None:
    answer = {"role": "assistant", "content": "Stop."}
    plain = {"messages": [{"role": "user", "content": "<image>Read it."}, answer]}
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "Read it."}]
    url = [{"type": "image_url", "image_url": {"url": "a.png"}}, parts[1]]
    bare = [{"type": "image"}, parts[1]]
    expected = parse({**plain, "images": ["a.png"]})
    assert expected.layout == "messages" and expected.images == ("a.png",)
    for content in (parts, url):
        assert parse({"messages": [{"role": "user", "content": content}, answer]}) == expected
    record = {"messages": [{"role": "user", "content": bare}, answer], "images": ["a.png"]}
    assert parse(record) == expected


def test_named_and_listed_images_keep_the_order_of_their_places() -> None:
    content = [
        {"type": "text", "text": "<image>"},
        {"type": "image", "image": "b.png"},
        {"type": "image"},
    ]
    record = parse({"messages": [{"role": "user", "content": content}], "images": ["a", "c"]})
    assert record.images == ("a", "b.png", "c")
    assert record.turns[0].text == "<image><image><image>"


def test_text_and_roles() -> None:
    assert parse({"text": "one\n"}).turns == (Turn(role="text", text="one\n"),)
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


def test_own_placeholder_and_fixed_layout() -> None:
    record = llava(question="<img> and <image>", image="a")
    assert parse(record, placeholder="<img>").images == ("a",)
    with pytest.raises(RecordError, match="'text' must be a string, not null"):
        parse(record, layout="text")
    with pytest.raises(RecordError, match="unknown layout 'obelics'"):
        parse(record, layout="obelics")


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (["a"], "must be a JSON object, not a list"),
        (None, "must be a JSON object, not null"),
        (3, "must be a JSON object, not a number"),
        ({"id": 1}, "none of the fields 'conversations', 'messages' and 'text'"),
        (llava(image=5), "field 'image' must be a string or a list, not a number"),
        (llava(image={"a": 1}), "field 'image' must be a string or a list, not an object"),
        (llava(images=["a", ""]), r"field 'images\[1\]' must be a file name, not an empty string"),
        (llava(images=[None]), r"field 'images\[0\]' must be a file name, not null"),
        (llava(image="a", images=["b"]), "both fields 'image' and 'images'"),
        ({"conversations": "hello"}, "field 'conversations' must be a list of turns"),
        ({"conversations": []}, "field 'conversations' must hold a turn"),
        ({"conversations": [["human"]]}, r"'conversations\[0\]' must be an object, not a list"),
        ({"conversations": [{"from": "gpt"}]}, r"field 'conversations\[0\].value' is missing"),
        (
            {"conversations": [{"from": "gpt", "value": None}]},
            r"'conversations\[0\].value' must be a string, not null",
        ),
        ({"conversations": [{"from": "me", "value": ""}]}, "must be one of system, user.*'me'"),
        ({"messages": [{"role": True, "content": ""}]}, "not a boolean"),
        ({"messages": [{"role": "user", "content": [1]}]}, r"content\[0\]' must be an object"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "not 'video'"),
        ({"text": 1}, "field 'text' must be a string, not a number"),
        (llava(question="<image><image>", image="a"), "2 placeholders '<image>', 1 image"),
        (llava(question="<image>", images=["a", "b"]), "1 placeholder '<image>', 2 images"),
        (llava(image="a"), "no placeholders '<image>', 1 image"),
        (llava(question="<image>"), "1 placeholder '<image>', no images"),
    ],
)
def test_what_is_wrong_is_named(record: object, reason: str) -> None:
    with pytest.raises(RecordError, match=reason):
        parse(record)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "\xe9t\xe9"}', "invalid UTF-8 at byte 10"),
        (b'{"text": "cut', "not valid JSON at character"),
        (b'{"text": "a", "score": NaN}', "not valid JSON"),
        (b'{"text": ' + b"[" * 100_000, "nested too deep"),
        (b"[" * 1_000_000, "nested too deep"),
        (b'{"text": "\\uZZZZ"}', "not valid JSON"),
    ],
)
def test_bytes_that_are_no_record(line: bytes, reason: str) -> None:
    with pytest.raises(RecordError, match=reason):
        parse_record(line)


def test_lone_surrogates_are_replaced_and_pairs_and_backslashes_kept() -> None:
    line = rb'{"text": "\ud83d \uDE00 \ud83d\ude00 \\ud83d \"\udc00"}'
    (turn,) = parse_record(line).turns
    assert turn.text == '\ufffd \ufffd \U0001f600 \\ud83d "\ufffd'


def test_of_a_key_given_twice_the_last_counts() -> None:
    assert parse_record(b'{"text": "a", "text": "b"}').turns[0].text == "b"


@settings(deadline=None, max_examples=200)
@given(
    st.binary(max_size=60)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "text",
                        "image",
                        "images",
                        "conversations",
                        "messages",
                        "role",
                        "from",
                        "value",
                        "content",
                        "type",
                        "image_url",
                        "url",
                    ]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    ).map(lambda value: json.dumps(value).encode())
)
def test_any_bytes_give_a_record_or_a_reason(line: bytes) -> None:
    try:
        record = parse_record(line)
    except RecordError:
        return
    places = sum(turn.text.count("<image>") for turn in record.turns)
    assert places == len(record.images)
    "".join(turn.text for turn in record.turns).encode()

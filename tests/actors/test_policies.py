from __future__ import annotations

import pytest

from dataservice.actors.holes import Hole
from dataservice.actors.policies import built_by, check_policy, decoder_and_policy, failure_of
from dataservice.errors import DataError, ImageError, RecordError, ResumeRefused


@pytest.mark.parametrize("policy", ["hole", "fallback", "fail"])
@pytest.mark.parametrize("decoder", ["pil", "", "a; errors.bad_image hole", "pillow 12, x; y"])
def test_what_packs_are_built_by_reads_back(decoder: str, policy: str) -> None:
    assert decoder_and_policy(built_by(decoder, policy)) == (decoder, policy)


def test_a_text_without_a_policy_means_hole() -> None:
    assert decoder_and_policy("pillow 12, probe abc") == ("pillow 12, probe abc", "hole")


def test_another_policy_is_refused_with_both_values_and_the_remedy() -> None:
    check_policy(saved="hole", now="hole", what="run a")
    with pytest.raises(ResumeRefused) as refused:
        check_policy(saved="hole", now="fallback", what="run a")
    text = str(refused.value)
    assert text.startswith("run a has errors.bad_image hole, this service fallback: ")
    assert "serve with errors.bad_image: hole" in text and "new run" in text


def test_a_failure_says_which_picture_and_what_to_do() -> None:
    hole = Hole(
        key="s/a.jsonl@10#1",
        reason="truncated JPEG",
        pack_number=3,
        policy="fail",
        member="x.jpg",
        archive="a.zip",
    )
    error = failure_of(hole)
    assert isinstance(error, ImageError)
    where = (error.source, error.shard, error.sample, error.member)
    assert where == ("s", "a.jsonl", "s/a.jsonl@10", "x.jpg")
    text = str(error)
    assert text.startswith(
        "source s, shard a.jsonl, sample s/a.jsonl@10, member x.jpg: truncated JPEG (in s/a.zip); "
    )
    assert "repair or remove it" in text and "errors.bad_image" in text


def test_a_record_that_cannot_be_read_fails_as_a_record() -> None:
    hole = Hole(key="s/a.jsonl@10#record", reason="damaged", pack_number=3, policy="fail")
    error: DataError = failure_of(hole)
    assert isinstance(error, RecordError)
    assert (error.sample, error.member) == ("s/a.jsonl@10", "")

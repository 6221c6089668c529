"""dataservice.pipeline.pictures: where a picture lies, for people."""

import pytest

from dataservice.pipeline.pictures import _shard_place


@pytest.mark.parametrize(
    ("name", "place"),
    [("a.zip", "birds/a.zip"), ("/data/a.zip", "/data/a.zip"), ("s3://b/a.zip", "s3://b/a.zip")],
)
def test_a_whole_path_stands_alone(name: str, place: str) -> None:
    assert _shard_place("birds", name) == place

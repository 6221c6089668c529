"""The table of metrics, and the text that is made of figures."""

from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dataservice.obs.metrics import METRICS, Sheet


def test_names_say_what_they_count() -> None:
    for name, spec in METRICS.items():
        assert re.fullmatch(r"dataservice(_[a-z]+)+", name), name
        assert name.endswith("_total") == (spec.kind == "counter"), name
        assert spec.text.endswith(".") and spec.roles, name
        assert len(spec.labels) <= 2, name
        unit = name.removesuffix("_total").rpartition("_")[2]
        assert spec.unit == (unit if unit in ("seconds", "bytes", "ratio") else ""), name
        assert not re.search(r"_(ms|s|kb|mb|mib|percent|count|sum|bucket)(_total)?$", name), name


def test_the_text_has_what_was_put() -> None:
    sheet = Sheet("worker", job='a "b"\\\n')
    sheet.put("packs_total", 3)
    sheet.put("stuck_threads", 1, kind="read")
    sheet.put("stuck_threads", 2, kind="decode")
    sheet.put_histogram("decode_seconds", (0.1, 1.0), (4, 0, 2), 7.5, kind="picture")
    families = {f.name: f for f in text_string_to_metric_families(sheet.text().decode())}
    assert families["dataservice_packs"].type == "counter"
    assert families["dataservice_packs"].documentation == METRICS["dataservice_packs_total"].text
    samples = [s for family in families.values() for s in family.samples]
    assert {s.labels["job"] for s in samples} == {'a "b"\\\n'}
    stuck = {s.labels["kind"]: s.value for s in families["dataservice_stuck_threads"].samples}
    assert stuck == {"read": 1, "decode": 2}
    decode = families["dataservice_decode_seconds"].samples
    buckets = {s.labels["le"]: s.value for s in decode if s.name.endswith("_bucket")}
    assert buckets == {"0.1": 4, "1.0": 4, "+Inf": 6}
    assert {s.name: s.value for s in decode if "le" not in s.labels} == {
        "dataservice_decode_seconds_count": 6,
        "dataservice_decode_seconds_sum": 7.5,
    }


@pytest.mark.parametrize(
    ("role", "name", "labels"),
    [
        ("worker", "nothing_total", {}),
        ("stager", "packs_total", {}),
        ("worker", "packs_total", {"dp_rank": "1"}),
        ("worker", "stuck_threads", {}),
    ],
)
def test_what_the_table_does_not_have_is_refused(
    role: str, name: str, labels: dict[str, str]
) -> None:
    with pytest.raises(ValueError, match=name):
        Sheet(role, job="j").put(name, 1, **labels)  # type: ignore[arg-type]


def test_as_many_counts_as_bounds_and_one() -> None:
    with pytest.raises(ValueError, match="zip"):
        Sheet("worker", job="j").put_histogram("decode_seconds", (1.0,), (1,), 0, kind="picture")

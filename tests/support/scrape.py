"""Reads metrics as Prometheus does, and holds them to the table."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterable
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from dataservice.obs.metrics import CLIENT, COMMON, METRICS, Role

Samples = dict[str, dict[tuple[tuple[str, str], ...], float]]
"""Name -> sorted labels, without the common ones -> value."""


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as answer:
        body: bytes = answer.read()
    return body


def get_json(url: str) -> Any:
    return json.loads(get(url))


def samples_of(text: str, role: Role) -> Samples:
    """Asserts that each is in the table, with its type, help, labels and role."""
    common = CLIENT if role == "client" else COMMON
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        name = family.name + ("_total" if family.type == "counter" else "")
        spec = METRICS[name]
        assert role in spec.roles, name
        assert (family.type, family.documentation) == (spec.kind, spec.text), name
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "le"}
            assert set(labels) == {*common, *spec.labels}, sample
            shown = {k: v for k, v in sample.labels.items() if k not in common}
            found.setdefault(sample.name, {})[tuple(sorted(shown.items()))] = sample.value
    return found


def one(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"dataservice_{name}"][tuple(sorted(labels.items()))]


def missing(samples: Iterable[str], role: Role) -> set[str]:
    """Metrics of the role that the samples lack."""
    names = {name.removesuffix("_count") for name in samples} | set(samples)
    return {name for name, spec in METRICS.items() if role in spec.roles} - names

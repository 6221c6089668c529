from __future__ import annotations

import dataclasses
import json
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.core.cost import measure, nanoseconds, sample_cost, sum_groups
from dataservice.core.fitted import LARGEST_CONSTANT_FS, LARGEST_FS, FittedCost
from dataservice.core.settings import CostModel
from dataservice.core.tables import SampleColumns
from dataservice.core.vision import VisionRules
from dataservice.errors import ConfigError

RULES = VisionRules(patch=14, merge=2)
FITTED = FittedCost.of(
    patches_fs=60_000_000_000,
    patches_squared_fs=14_648_437,
    length_squared_fs=400_001,
    constant_fs=30_000_000_000_000,
)


def _columns() -> SampleColumns:
    return SampleColumns(
        text_tokens=np.array([10, 20, 30]),
        loss_tokens=np.array([5, 6, 7]),
        image_offsets=np.array([0, 2, 2, 3]),
        width=np.array([56, 112, 224]),
        height=np.array([56, 56, 224]),
    )


def cost(model: CostModel, fitted: FittedCost | None = None) -> list[int]:
    measures = measure(_columns(), rules=RULES)
    values: list[int] = sample_cost(
        model,
        num_patches=measures.num_patches,
        patches_squared=measures.patches_squared,
        image_tokens=measures.image_tokens,
        length=measures.length,
        p_ref=100,
        fitted=fitted,
    ).tolist()
    return values


# ---- measures and costs of samples ---------------------------------------------------------------


def test_measures_are_sums_over_a_samples_images() -> None:
    measures = measure(_columns(), rules=RULES)
    assert measures.num_patches.tolist() == [16 + 32, 0, 256]
    assert measures.patches_squared.tolist() == [16**2 + 32**2, 0, 256**2]
    assert measures.image_tokens.tolist() == [12, 0, 64]
    assert measures.length.tolist() == [22, 20, 94]
    assert measures.num_images.tolist() == [2, 0, 1]
    assert measures.loss_tokens.tolist() == [5, 6, 7]


def test_measures_of_tiles() -> None:
    """448 x 448 each, 1 x 1, 1 x 2 and a thumbnail, 1 x 1."""
    rules = VisionRules(mode="tiles", max_tiles=2)
    measures = measure(_columns(), rules=rules)
    assert measures.num_patches.tolist() == [4 * 1024, 0, 1024]
    assert measures.patches_squared.tolist() == [4 * 1024**2, 0, 1024**2]
    assert measures.image_tokens.tolist() == [4 * 256, 0, 256]
    assert measures.length.tolist() == [10 + 4 * 256, 20, 30 + 256]


def test_vit_cost_is_the_sum_over_images() -> None:
    assert cost("vit_cost") == [16 * 116 + 32 * 132, 0, 256 * 356]


def test_image_tokens_as_the_cost() -> None:
    assert cost("image_tokens") == [12, 0, 64]


def test_fitted_cost_is_nanoseconds_without_the_constant() -> None:
    exact = [
        Fraction(60_000_000_000 * p + 14_648_437 * p2 + 400_001 * length**2, 10**6)
        for p, p2, length in ((48, 16**2 + 32**2, 22), (0, 0, 20), (256, 256**2, 94))
    ]
    assert cost("fitted", FITTED) == [int(ns + Fraction(1, 2)) for ns in exact]


def test_fitted_without_coefficients_names_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"plan\.cost_file"):
        cost("fitted")


@given(
    st.lists(
        st.tuples(st.integers(0, LARGEST_FS), st.integers(0, 3 * 10**12)), min_size=1, max_size=3
    )
)
@settings(deadline=None)
def test_nanoseconds_are_exact_at_any_size(terms: list[tuple[int, int]]) -> None:
    exact = Fraction(sum(c * v for c, v in terms), 10**6)
    found = nanoseconds(*((c, np.array([v, 0])) for c, v in terms))
    assert found.dtype == np.int64
    assert found.tolist() == [int(exact + Fraction(1, 2)), 0]


def test_sum_groups_with_empty_groups() -> None:
    assert sum_groups(np.array([1, 2, 3]), np.array([0, 0, 2, 2, 3])).tolist() == [0, 3, 0, 3]
    assert sum_groups(np.zeros(0, dtype=np.int64), np.array([0, 0])).tolist() == [0]


# ---- the fitted model and its JSON form ----------------------------------------------------------


@given(
    st.tuples(*[st.integers(0, LARGEST_FS)] * 3).filter(any), st.integers(0, LARGEST_CONSTANT_FS)
)
@settings(deadline=None)
def test_json_keeps_every_femtosecond(terms: tuple[int, int, int], constant: int) -> None:
    model = FittedCost.of(
        patches_fs=terms[0],
        patches_squared_fs=terms[1],
        length_squared_fs=terms[2],
        constant_fs=constant,
    )
    assert FittedCost.from_json(model.to_json(), name="cost.json") == model
    fields = json.loads(model.to_json())
    assert fields["patches_ns"] == terms[0] / 10**6
    assert fields["version"] == model.version


def test_the_version_follows_the_coefficients() -> None:
    values = dataclasses.asdict(FITTED)
    assert len(values.pop("version")) == 12
    assert FittedCost.of(**values) == FITTED
    others = {FittedCost.of(**(values | {name: 7})).version for name in values}
    assert len({FITTED.version, *others}) == 5


def test_json_rounds_to_femtoseconds_and_may_lack_the_version() -> None:
    text = """{"model": "fitted", "patches_ns": 60000, "patches_squared_ns": 1e1,
               "length_squared_ns": 0.4000005, "constant_ns": 0}"""
    model = FittedCost.from_json(text, name="cost.json")
    assert model.coefficients_fs == (60_000_000_000, 10_000_000, 400_000, 0)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("patches_ns", -0.5, r"patches_ns: -0\.5 should be from 0 to 1000000"),
        ("patches_ns", 1e7, r"patches_ns: 10000000 should be .* look at the unit"),
        ("patches_ns", 1e300, r"patches_ns: is 1E\+300"),
        ("patches_squared_ns", float("nan"), "patches_squared_ns: is nan, should be a number"),
        ("length_squared_ns", "0.4", "length_squared_ns: is 0.4, should be a number"),
        ("length_squared_ns", True, "length_squared_ns: is True"),
        ("constant_ns", None, "constant_ns: is None"),
        ("constant_ms", 3, "constant_ms: unknown key; known are model, version"),
        ("model", "linear", "model: 'linear' should be 'fitted'"),
        ("version", "beef", r"version: 'beef' is not that of these coefficients, '\w{12}'"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(key: str, value: object, words: str) -> None:
    fields = json.loads(FITTED.to_json()) | {key: value}
    with pytest.raises(ConfigError, match=rf"^here/cost\.json: {words}"):
        FittedCost.from_json(json.dumps(fields), name="here/cost.json")


def test_a_missing_field_a_broken_file_and_a_model_without_cost() -> None:
    fields = json.loads(FITTED.to_json())
    del fields["patches_ns"]
    with pytest.raises(ConfigError, match=r"^c: patches_ns: is missing"):
        FittedCost.from_json(json.dumps(fields), name="c")
    with pytest.raises(ConfigError, match=r"^c:2: not JSON"):
        FittedCost.from_json('{\n"model": fitted}', name="c")
    with pytest.raises(ConfigError, match=r"^c: should be one JSON object"):
        FittedCost.from_json("[]", name="c")
    for number in ("9" * 5000, "1e99999999999999999999"):
        with pytest.raises(ConfigError, match=r"^c: "):
            FittedCost.from_json(json.dumps(fields)[:-1] + f', "patches_ns": {number}}}', name="c")
    with pytest.raises(ConfigError, match=r"^c: is nested too deeply"):
        FittedCost.from_json("[" * 100_000, name="c")
    free = {name: 0 for name in fields if name.endswith("_ns")} | {"patches_ns": 0}
    with pytest.raises(ConfigError, match=r"^c: patches_ns, .*: all 0.*look at the unit"):
        FittedCost.from_json(json.dumps({"model": "fitted"} | free), name="c")

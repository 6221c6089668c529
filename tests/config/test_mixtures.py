"""Mixture files of other trainers: what becomes of them, and what is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from dataservice.config import Config, config_from_json, config_to_json, load_config
from dataservice.errors import ConfigError

HEAD = "job: j\nindex_dir: index\nstate_dir: state\n"
FINITE = "plan: {epochs: 2}\n"
ENDLESS = "plan: {epochs: endless}\n"


def load(
    folder: Path, content: Any, run: str = "", *, name: str = "mix.json", **options: object
) -> Config:
    """The config of a run whose mixture file holds `content`, written to folder/mixes/NAME."""
    path = folder / "mixes" / name
    path.parent.mkdir(exist_ok=True)
    if isinstance(content, str):
        path.write_text(content, encoding="utf-8")
    else:
        path.write_text(json.dumps(content), encoding="utf-8")
    mixture = {"file": f"mixes/{name}", **options} if options else f"mixes/{name}"
    (folder / "run.yaml").write_text(HEAD + yaml.safe_dump({"mixture": mixture}) + run)
    return load_config(folder / "run.yaml")


def refused(folder: Path, content: Any, run: str = "", **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, content, run, **options)
    return str(caught.value)


def sources(config: Config) -> list[tuple[str, str, tuple[str, ...], str]]:
    return [(s.name, s.records[0], s.images, s.take) for s in config.sources]


# ---- InternVL ------------------------------------------------------------------------------------

INTERNVL = {
    "docs": {
        "root": "data/docs/",
        "annotation": "docs.jsonl",
        "data_augment": False,
        "max_dynamic_patch": 12,
        "repeat_time": 2,
        "length": 10211,
    },
    "charts & more": {"root": "s3://bucket/charts", "annotation": "/a/c.jsonl", "repeat_time": 0.3},
    "text": {"root": "", "annotation": "text.jsonl"},
}


def test_internvl_becomes_sources(tmp_path: Path) -> None:
    config = load(tmp_path, INTERNVL)
    mixes = tmp_path / "mixes"
    assert sources(config) == [
        ("docs", f"{mixes}/docs.jsonl", (f"{mixes}/data/docs",), "all"),
        ("charts_more", "/a/c.jsonl", ("s3://bucket/charts",), "first:30%"),
        ("text", f"{mixes}/text.jsonl", (), "all"),
    ]
    assert [share.repeat for share in config.plan.sources] == ["2", "1", "1"]
    assert all(source.format.mismatch == "front" for source in config.sources)
    assert config_from_json(config_to_json(config)) == config


@pytest.mark.parametrize(
    ("times", "take", "repeat"),
    [
        ("0.125", "first:12.5%", "1"),
        ("0.1", "first:10%", "1"),
        ("1e-3", "first:0.1%", "1"),
        ("1", "all", "1"),
        ("1.0", "all", "1"),
        ("1.5", "all", "3/2"),
        ("null", "all", "1"),
    ],
)
def test_repeat_time_is_a_leading_share_or_a_repetition(
    tmp_path: Path, times: str, take: str, repeat: str
) -> None:
    text = f'{{"a": {{"root": "", "annotation": "a.jsonl", "repeat_time": {times}}}}}'
    config = load(tmp_path, text)
    assert (config.sources[0].take, config.plan.sources[0].repeat) == (take, repeat)


def test_lengths_are_the_weights_of_an_endless_run(tmp_path: Path) -> None:
    content = {
        "a": {"root": "", "annotation": "a.jsonl", "length": 100, "repeat_time": 0.5},
        "b": {"root": "", "annotation": "b.jsonl", "length": 30, "repeat_time": 2},
    }
    assert [share.weight for share in load(tmp_path, content, ENDLESS).plan.sources] == ["50", "60"]
    message = refused(tmp_path, content, "plan: {epochs: endless, weight_by: tokens}\n")
    assert "gives shares of samples, not tokens: set plan.weight_by: samples" in message
    del content["b"]["length"]
    message = refused(tmp_path, content, ENDLESS)
    assert "mix.json: gives no weight for b, and an endless run needs them" in message


def test_relative_paths_are_below_the_file_or_else_below_the_config(tmp_path: Path) -> None:
    for place in ("mixes/both.jsonl", "both.jsonl", "config.jsonl", "imgs/a.zip"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_bytes(b"")
    content = {
        name: {"root": "imgs", "annotation": f"{name}.jsonl"} for name in ("both", "config", "none")
    }
    assert sources(load(tmp_path, content)) == [
        ("both", f"{tmp_path}/mixes/both.jsonl", (f"{tmp_path}/imgs",), "all"),
        ("config", f"{tmp_path}/config.jsonl", (f"{tmp_path}/imgs",), "all"),
        ("none", f"{tmp_path}/mixes/none.jsonl", (f"{tmp_path}/imgs",), "all"),
    ]


def test_variables_in_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA", "/data")
    monkeypatch.delenv("NONE", raising=False)
    content = {"a": {"root": "${DATA}/i", "annotation": "$DATA/a*.jsonl"}}
    assert sources(load(tmp_path, content)) == [("a", "/data/a*.jsonl", ("/data/i",), "all")]
    content["a"]["root"] = "$NONE/i"
    assert "a.root: the environment variable NONE is not set" in refused(tmp_path, content)


def test_keys_without_effect_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    load(tmp_path, INTERNVL | {"more": {**INTERNVL["docs"], "comment": "x"}})
    assert caplog.messages == [
        f"mixture {tmp_path}/mixes/mix.json: these keys have no effect here: comment (more), "
        "data_augment (docs and others), max_dynamic_patch (docs and others)"
    ]


def test_a_key_that_may_be_misspelt_is_refused(tmp_path: Path) -> None:
    content = {"a": {"root": "", "annotation": "a.jsonl", "repeat_times": 3}}
    message = refused(tmp_path, content)
    assert "mix.json: a.repeat_times: unknown key; did you mean repeat_time?" in message


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"annotation": 3}, "a.annotation: should be a text, got 3"),
        ({"annotation": ""}, "a.annotation: should be a text, got ''"),
        ({"annotation": "a", "root": ["x"]}, "a.root: should be a text, got ['x']"),
        ({"annotation": "a", "repeat_time": 0}, "a.repeat_time: should be above 0, got 0"),
        ({"annotation": "a", "repeat_time": True}, "a.repeat_time: should be a number, got True"),
        ({"annotation": "a", "repeat_time": "2"}, "a.repeat_time: should be a number, got '2'"),
        ({"annotation": "a", "length": float("nan")}, "a.length: should be a number or a fraction"),
    ],
)
def test_wrong_values_are_named(tmp_path: Path, entry: dict[str, Any], words: str) -> None:
    assert words in refused(tmp_path, {"a": entry})


# ---- Energon -------------------------------------------------------------------------------------


def energon(train: str, head: str = "__class__: MetadatasetV2\n") -> str:
    return (
        f"__module__: megatron.energon\n{head}splits:\n  val: {{path: v.jsonl}}\n  train: {train}\n"
    )


def test_a_blend_gives_weights(tmp_path: Path) -> None:
    text = energon(
        "{blend: [{weight: 5, path: ./coco.jsonl, aux: {img: 'filesystem://./images', "
        "more: ./wds, abs: 'filesystem:///data/i'}, subflavors: {kind: cap}}, "
        "{weight: 0.2, path: ./b.jsonl}, {path: s3://bucket/c.jsonl}]}"
    )
    config = load(tmp_path, text, ENDLESS, name="mix.yaml")
    mixes = tmp_path / "mixes"
    images = (f"{mixes}/images", f"{mixes}/wds/**/*.tar", "/data/i")
    assert sources(config) == [
        ("coco", f"{mixes}/coco.jsonl", images, "all"),
        ("b", f"{mixes}/b.jsonl", (), "all"),
        ("c", "s3://bucket/c.jsonl", (), "all"),
    ]
    assert [share.weight for share in config.plan.sources] == ["5", "1/5", "1"]
    message = refused(tmp_path, text, FINITE, name="mix.yaml")
    assert "weights of a blend count in endless runs: set plan.epochs: endless" in message


def test_an_epochized_blend_gives_repetitions(tmp_path: Path) -> None:
    text = energon("{blend_epochized: [{repetitions: 5, path: a.jsonl}, {path: b.jsonl}]}")
    config = load(tmp_path, text, FINITE, name="mix.yaml")
    assert [share.repeat for share in config.plan.sources] == ["5", "1"]
    message = refused(tmp_path, text, ENDLESS, name="mix.yaml")
    assert "repetitions count in finite runs: set plan.epochs to a number" in message


def test_a_single_path_and_the_older_form(tmp_path: Path) -> None:
    for run in (FINITE, ENDLESS):
        assert len(load(tmp_path, energon("{path: a.jsonl}"), run, name="m.yaml").sources) == 1
    older = energon("{datasets: [{weight: 1, path: a.jsonl}, {weight: 3, path: b.jsonl}]}", "")
    config = load(tmp_path, older, ENDLESS, name="m.yaml")
    assert [share.weight for share in config.plan.sources] == ["1", "3"]


def test_files_that_name_files(tmp_path: Path) -> None:
    inner = tmp_path / "mixes" / "deep" / "inner.yaml"
    inner.parent.mkdir(parents=True)
    inner.write_text(
        energon(
            "{blend: [{weight: 3, path: x.jsonl}, {path: y.jsonl, aux: {i: 'filesystem://i'}}]}"
        )
    )
    outer = energon("{blend: [{weight: 2, path: deep/inner.yaml}, {weight: 6, path: z.jsonl}]}")
    config = load(tmp_path, outer, ENDLESS, name="mix.yaml")
    deep = str(inner.parent)
    assert sources(config) == [
        ("x", f"{deep}/x.jsonl", (), "all"),
        ("y", f"{deep}/y.jsonl", (f"{deep}/i",), "all"),
        ("z", f"{tmp_path}/mixes/z.jsonl", (), "all"),
    ]
    # Two eighths for the inner file, three quarters of them for x.
    assert [share.weight for share in config.plan.sources] == ["3/2", "1/2", "6"]
    val = energon("{path: deep/inner.yaml, split_part: val}")
    assert sources(load(tmp_path, val, name="mix.yaml"))[0][1] == f"{deep}/v.jsonl"
    missing = energon("{path: deep/inner.yaml, split_part: test}")
    assert "inner.yaml: splits: has no test; it has val, train" in refused(
        tmp_path, missing, name="mix.yaml"
    )


def test_files_that_name_themselves_end(tmp_path: Path) -> None:
    text = energon("{path: mix.yaml}")
    assert "name each other more than 16 deep" in refused(tmp_path, text, name="mix.yaml")
    wide = energon("{blend: [" + "{path: mix.yaml}, " * 20 + "]}")
    message = refused(tmp_path, wide, ENDLESS, name="mix.yaml")
    assert "deep" in message or "entries" in message


@pytest.mark.parametrize(
    ("subset", "inner", "take"),
    [
        ("['0%', '80%']", None, "first:80%"),
        ("['87.5%', '100%']", None, "end:12.5%"),
        ("['0%', '100%']", None, "all"),
        ("[0, end]", None, "all"),
        ("['0%', '50%']", "[0, end]", "first:50%"),
        ("[0, 1000]", None, "first:1000"),
        ("['0%', '50%']", "[0, 1000]", "first:500"),
        ("['0%', '50%']", "['0%', '50%']", "first:25%"),
        ("['50%', '100%']", "['50%', '100%']", "end:25%"),
    ],
)
def test_subsets(tmp_path: Path, subset: str, inner: str | None, take: str) -> None:
    leaf = "path: a.jsonl" + (f", subset: {{range: {inner}}}" if inner else "")
    text = energon(f"{{subset: {{range: {subset}}}, blend: [{{{leaf}}}]}}")
    assert load(tmp_path, text, ENDLESS, name="mix.yaml").sources[0].take == take


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ("{path: ./coco}", "coco is not a JSONL file: samples that are members of tars"),
        ("{join: [{path: a.jsonl}], joiner: x}", "joined data sets are not read"),
        ("{path: a.jsonl, blend: []}", "should have one of path, blend"),
        ("{subflavors: {a: b}}", "should have one of path, blend"),
        ("{blend: []}", "splits.train.blend: should be a list with at least one item"),
        ("{blend: [3]}", "splits.train.blend[0]: should be a mapping, got 3"),
        ("{blend: [{path: a.jsonl, weight: x}]}", "blend[0].weight: should be a number"),
        ("{path: a.jsonl, subset: {range: ['20%', '50%']}}", "only subsets that begin"),
        ("{path: a.jsonl, subset: {range: ['50%', '20%']}}", "from a lower to a higher"),
        ("{path: a.jsonl, subset: {range: [0]}}", "should be such as"),
        ("{path: a.jsonl, subset: {range: [5, end]}}", "only subsets that begin"),
        (
            "{blend_epochized: [{path: a.jsonl, weight: 2}]}",
            "[0].weight: 2 counts in a blend; in blend_epochized give repetitions",
        ),
        (
            "{blend: [{path: a.jsonl, repetitions: 2}]}",
            "[0].repetitions: 2 count in blend_epochized; in a blend give weight",
        ),
        ("{path: a.jsonl, aux: {i: 'msc://b/i'}}", "aux.i: msc:// is not read: give a folder"),
        ("{path: a.jsonl, aux: {i: 3}}", "aux.i: should be a path, got 3"),
        ("{blend: [{blend_epochized: [{path: a.jsonl}]}]}", "inside blend cannot be read"),
        (
            "{blend_epochized: [{repetitions: 2, blend: [{path: a.jsonl}]}]}",
            "blend inside blend_epochized cannot be read",
        ),
        ("{path: none/x.yaml}", "none/x.yaml cannot be read"),
        ("{path: a.jsonl, weights: 3}", "weights: unknown key; did you mean weight?"),
    ],
)
def test_what_is_not_read_is_refused_with_the_reason(
    tmp_path: Path, train: str, words: str
) -> None:
    assert words in refused(tmp_path, energon(train), ENDLESS, name="mix.yaml")


# ---- LLaVA-OneVision and Qwen --------------------------------------------------------------------


def test_onevision_becomes_sources(tmp_path: Path) -> None:
    text = """\
datasets:
  - json_path: /d/a.json
    sampling_strategy: all
  - {json_path: b.jsonl, sampling_strategy: "first:10%"}
  - {json_path: sub/b.jsonl, sampling_strategy: "end:3000"}
  - {json_path: c.json, sampling_strategy: "random: 50%"}
  - {json_path: d.json}
"""
    config = load(tmp_path, text, name="mix.yaml", images=["imgs", "s3://bucket/i.zip"])
    mixes, images = tmp_path / "mixes", (f"{tmp_path}/imgs", "s3://bucket/i.zip")
    assert sources(config) == [
        ("a", "/d/a.json", images, "all"),
        ("b", f"{mixes}/b.jsonl", images, "first:10%"),
        ("b-2", f"{mixes}/sub/b.jsonl", images, "end:3000"),
        ("c", f"{mixes}/c.json", images, "random:50%"),
        ("d", f"{mixes}/d.json", images, "all"),
    ]
    assert "gives no weight for a" in refused(tmp_path, text, ENDLESS, name="mix.yaml")


@pytest.mark.parametrize("strategy", ["some", "first", "first:", "random:-3", "end:10 %%"])
def test_an_unknown_strategy_is_named(tmp_path: Path, strategy: str) -> None:
    text = yaml.safe_dump({"datasets": [{"json_path": "a", "sampling_strategy": strategy}]})
    message = refused(tmp_path, text, name="mix.yaml")
    assert "datasets[0].sampling_strategy: should be all, first:N" in message


QWEN = {
    "cambrian_737k": {"annotation_path": "/d/c.json", "data_path": ""},
    "mp_doc": {"annotation_path": "/d/m.json", "data_path": "/d/images"},
}


def test_qwen_becomes_sources_by_name_and_share(tmp_path: Path) -> None:
    assert [s.name for s in load(tmp_path, QWEN).sources] == ["cambrian_737k", "mp_doc"]
    config = load(tmp_path, QWEN, use=["mp_doc%50", "cambrian_737k"])
    assert sources(config) == [
        ("mp_doc", "/d/m.json", ("/d/images",), "random:50%"),
        ("cambrian_737k", "/d/c.json", (), "all"),
    ]
    assert "has no part 'other'; it has cambrian_737k, mp_doc" in refused(
        tmp_path, QWEN, use="other%5"
    )
    assert "from 1 to 100 percent" in refused(tmp_path, QWEN, use="mp_doc%0")


def test_use_leaves_a_share_of_the_file_alone(tmp_path: Path) -> None:
    assert "takes first:30% of it already" in refused(tmp_path, INTERNVL, use="charts & more%50")
    assert [s.name for s in load(tmp_path, INTERNVL, use="docs").sources] == ["docs"]


# ---- all of them ---------------------------------------------------------------------------------


def test_a_mixture_stands_beside_sources(tmp_path: Path) -> None:
    own = "sources:\n  - {name: mine, records: m.jsonl}\n"
    assert [s.name for s in load(tmp_path, QWEN, own).sources] == [
        "mine",
        "cambrian_737k",
        "mp_doc",
    ]
    twice = own.replace("mine", "mp_doc")
    assert "the name mp_doc stands here twice" in refused(tmp_path, QWEN, twice)


def test_neither_sources_nor_mixture(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(HEAD)
    with pytest.raises(ConfigError, match="sources: this key is required"):
        load_config(tmp_path / "run.yaml")
    (tmp_path / "run.yaml").write_text(HEAD + "sources: []\nmixture: null\n")
    with pytest.raises(ConfigError, match="sources: name at least one, or a mixture"):
        load_config(tmp_path / "run.yaml")


@pytest.mark.parametrize(
    ("content", "name", "words"),
    [
        ("[]", "mix.json", "is none of InternVL's meta JSON"),
        ("{}", "mix.json", "is none of"),
        ("3", "mix.yaml", "is none of"),
        ('{"a": {"path": "x"}}', "mix.json", "is none of"),
        ("{", "mix.json", "is no JSON file"),
        ("a: [", "mix.yaml", "is no YAML file"),
        ("[" * 100_000, "mix.json", "mix.json"),
        ("[" * 100_000, "mix.yaml", "is nested too deeply"),
        ("datasets: !!python/name:os.system x", "mix.yaml", "is no YAML file"),
    ],
)
def test_what_is_no_mixture_is_refused(tmp_path: Path, content: str, name: str, words: str) -> None:
    assert words in refused(tmp_path, content, name=name)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for mixture in ("none.json", "s3://bucket/mix.json"):
        (tmp_path / "run.yaml").write_text(HEAD + f"mixture: {mixture}\n")
        with pytest.raises(ConfigError, match=r"(cannot be read|should be a local file)"):
            load_config(tmp_path / "run.yaml")
    (tmp_path / "run.yaml").write_text(HEAD + "mixture: {fil: x}\n")
    with pytest.raises(ConfigError, match=r"run.yaml:4: mixture.fil: .*did you mean mixture.file"):
        load_config(tmp_path / "run.yaml")


def test_an_alias_bomb_ends(tmp_path: Path) -> None:
    levels = ["splits: {train: {blend: &a0 [{path: a.jsonl}, {path: b.jsonl}]}"]
    levels += [f"  x{n}: &a{n} [{{blend: *a{n - 1}}}, {{blend: *a{n - 1}}}]" for n in range(1, 40)]
    text = ",\n".join(levels) + ",\n  bomb: {blend: *a39}}\n"
    path = tmp_path / "mixes" / "outer.yaml"
    path.parent.mkdir()
    path.write_text(energon("{path: mix.yaml, split_part: bomb}"))
    (tmp_path / "run.yaml").write_text(HEAD + "mixture: mixes/outer.yaml\n" + ENDLESS)
    (tmp_path / "mixes" / "mix.yaml").write_text(text)
    with pytest.raises(ConfigError, match="has more than 100,000 entries"):
        load_config(tmp_path / "run.yaml")


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        (
            '{"a": {"annotation": "a.jsonl"}, "a": {"annotation": "b.jsonl"}}',
            "mix.json",
            "the key 'a' stands twice in one object",
        ),
        (
            "splits:\n  train: {path: a.jsonl}\n  train: {path: b.jsonl}\n",
            "mix.yaml",
            "the key 'train' stands in line 3 and in line 2",
        ),
        (
            '{"a": {"annotation": "a.jsonl"}, "b": {"root": "x"}}',
            "mix.json",
            "b.annotation: should be a text, got None",
        ),
    ],
)
def test_a_part_is_never_left_out_in_silence(
    tmp_path: Path, text: str, name: str, words: str
) -> None:
    assert words in refused(tmp_path, text, name=name)


def test_absolute_names_by_option(tmp_path: Path) -> None:
    mix = {"a": {"annotation_path": "/d/a.json", "data_path": ""}}
    config = load(tmp_path, mix, strip_prefix="/", images=["/"])
    assert (config.sources[0].strip_prefix, config.sources[0].images) == ("/", ("/",))

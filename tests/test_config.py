"""The YAML boundary: what is accepted, what it becomes, and what an error says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dataservice.config import Config, config_from_json, config_to_json, load_config
from dataservice.config.values import parse_size
from dataservice.errors import ConfigError

ROOT = Path(__file__).parent.parent
MINIMAL = """\
job: j
index_dir: index
state_dir: state
sources:
  - {name: a, records: a/*.jsonl}
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def load(tmp_path: Path, text: str) -> Config:
    return load_config(write(tmp_path, text))


def refused(tmp_path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    return str(caught.value)


def test_minimal_file_has_the_settings_of_the_plan_as_defaults(tmp_path: Path) -> None:
    config = load(tmp_path, MINIMAL)
    assert config.index_dir == str(tmp_path / "index")
    assert config.sources[0].records == (str(tmp_path / "a/*.jsonl"),)
    assert config.plan.pack_length == 8192
    assert config.plan.sources[0].repeat == "1"
    assert config.plan.sources[0].weight is None
    assert config.staging.cache_dir is None
    assert config.workers.resource == "data_node"
    assert config.serving.host == "127.0.0.1"


def test_example_gives_every_key_and_the_defaults_it_claims(tmp_path: Path) -> None:
    example = load_config(ROOT / "deploy/example.yaml")
    assert example.staging.cache_dir == "/tmp/vlm-cache"
    minimal = load(tmp_path, MINIMAL)
    for section in ("text", "workers", "serving", "errors", "ranks_per_node"):
        assert getattr(example, section) == getattr(minimal, section), section
    for field in ("vision", "balance", "packer", "lanes", "window", "epochs", "p_ref", "seed"):
        assert getattr(example.plan, field) == getattr(minimal.plan, field), field


def test_example_names_every_key() -> None:
    from dataservice.config.parsing import _all_keys
    from dataservice.config.schema import ConfigFile

    text = (ROOT / "deploy/example.yaml").read_text(encoding="utf-8")
    missing = [path for path, leaf in _all_keys(ConfigFile) if f"{leaf}:" not in text]
    assert missing == []


def test_demo_file_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEMO_DIR", str(tmp_path))
    config = load_config(ROOT / "deploy/demo.yaml")
    assert config.state_dir == str(tmp_path / "state")
    assert config.sources[1].images == (str(ROOT / "tests/data/caption/*.zip"),)
    assert config.plan.vision.max_pixels < 14 * 14 * 2048


@pytest.mark.parametrize("name", ["example.yaml", "demo.yaml"])
def test_json_round_trip_is_exact(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEMO_DIR", str(tmp_path))
    config = load_config(ROOT / "deploy" / name)
    assert config_from_json(config_to_json(config)) == config


@pytest.mark.parametrize("text", ["{}", "no json", '{"job": 3}'])
def test_json_that_does_not_fit_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="same version on every node"):
        config_from_json(text)


@pytest.mark.parametrize(
    ("extra", "line", "words"),
    [
        ("plan: {pack_lenght: 4096}", 6, ["plan.pack_lenght", "did you mean plan.pack_length?"]),
        ("source: []", 6, ["source", "did you mean sources?"]),
        ("pack_length: 4096", 6, ["pack_length", "did you mean plan.pack_length?"]),
        ("workers:\n  zzz: 1", 7, ["workers.zzz", "Known here: count, min, max"]),
        ("vision: {patch: fourteen}", 6, ["vision.patch", "valid integer", "'fourteen'"]),
        ("vision: {patch: true}", 6, ["vision.patch", "valid integer", "True"]),
        ("plan: {packer: lfb}", 6, ["plan.packer", "'nbin' or 'balanced'", "'lfb'"]),
        ("errors: {bad_image: skip}", 6, ["errors.bad_image", "'fallback' or 'fail'", "'skip'"]),
        ("plan: {lanes: 0}", 6, ["plan.lanes", "greater than or equal to 1"]),
        ("staging: {budget_bytes: 3 bags}", 6, ["staging.budget_bytes", '"512 MiB"', "'3 bags'"]),
        ("staging: {deadline_s: .inf}", 6, ["staging.deadline_s", "finite"]),
        ("workers: {count: 9, max: 4}", 6, ["workers", "count 9", "max 4"]),
        ("workers: {memory_bytes: 64 MiB}", 6, ["memory_bytes 67108864", "null for no bound"]),
        ("workers: {memory_bytes: 512 MiB, ready_bytes: 1 GiB}", 6, ["ready_bytes 1073741824"]),
        ("vision: {std: [0.2, 0, 0.2]}", 6, ["vision.std[1]", "greater than 0"]),
        ("vision: {mean: [0.5, .nan, 0.5]}", 6, ["vision.mean[1]", "finite"]),
        ("vision: {min_pixels: 9000, max_pixels: 8000}", 6, ["vision", "9000", "8000"]),
        ("vision: {max_pixels: 700, min_pixels: 10}", 6, ["vision", "less than one image token"]),
        ("vision: {mode: tiles, tile: 450}", 6, ["vision", "450", "multiple of patch 14"]),
        ("vision: {min_tiles: 4, max_tiles: 3}", 6, ["vision", "min_tiles 4", "max_tiles 3"]),
        ("plan: {align: 100}", 6, ["plan", "align 100 does not divide pack_length 8192"]),
        ("plan: {align: 16, phases: [{pack_length: 1000}]}", 6, ["plan", "pack_length 1000"]),
        ("plan: {pack_length: 16777217}", 6, ["plan.pack_length", "at most 16,777,216"]),
        ("plan: {phases: [{max_pixels: 5000000000}]}", 6, ["max_pixels", "at most 4,294,967,296"]),
        ("balance: {min_images_per_rank: 9999999999999}", 6, ["balance.min_images", "at most"]),
        ("plan: {lanes: 0x" + "f" * 6000 + "}", 6, ["plan.lanes", "too long to show"]),
        ('plan: {llm_vit_ratio: "1e999999999"}', 6, ["plan.llm_vit_ratio", "from -99 to 99"]),
        ("serving: {port: 70000}", 6, ["serving.port", "65535"]),
        ("job: again", 6, ["job", "twice"]),
    ],
)
def test_errors_name_line_key_and_remedy(
    tmp_path: Path, extra: str, line: int, words: list[str]
) -> None:
    message = refused(tmp_path, MINIMAL + extra + "\n")
    assert f"run.yaml:{line}: " in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("fields: {imagee: x}", "sources[0]: fields: no layout has a field 'imagee'"),
        ("placeholder: '<{n}{n}>'", "sources[0]: placeholder: '<{n}{n}>' holds {n} more than once"),
        ("take: 'first:2.5'", "sources[0].take: should be all, first:N, end:N or random:N"),
        ("take: last:3", "sources[0].take: should be all, first:N, end:N or random:N"),
        ("take: 3", 'N a number or as "10%"; the first 3 are first:3, got 3'),
        ("take: 0.1", "sources[0].take: should be all, first:N, end:N or random:N"),
        ("take: 0.1", "the first 10% are first:10%, got 0.1"),
        ("take: 10%", "the first 10% are first:10%, got '10%'"),
        ("take: true", 'or as "10%", got True'),
        ("take: -3", 'or as "10%", got -3'),
        ("take: [1]", "sources[0].take: should be all, first:N, end:N or random:N"),
    ],
)
def test_what_a_source_cannot_be_read_by_is_known_before_it_is_read(
    tmp_path: Path, key: str, words: str
) -> None:
    text = MINIMAL.replace("sources:\n", f"sources:\n  - {{name: x, records: x, {key}}}\n", 1)
    message = refused(tmp_path, text)
    assert words in message and "run.yaml:" in message


def test_all_errors_come_at_once(tmp_path: Path) -> None:
    message = refused(
        tmp_path, "job: j\nindex_dir: i\nsources: [{name: a, records: x, layout: y}]\n"
    )
    assert message.count("\n") == 1
    assert "state_dir: this key is required" in message
    assert "run.yaml:3: sources[0].layout: " in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "should be a mapping"),
        ("- a\n- b", "should be a mapping"),
        ("job: [", "not a YAML file"),
        ("job: " + "9" * 5000, "not a YAML file"),
        ("[" * 100_000, "nested too deeply"),
        ("job: !!python/name:os.system x", "not a YAML file"),
        (
            "a0: &a0 [1]\n"
            + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)),
            "holds over 1,000,000 values, those of aliases",
        ),
    ],
)
def test_what_is_no_mapping_is_refused(tmp_path: Path, text: str, words: str) -> None:
    assert words in refused(tmp_path, text)


def test_a_mixture_is_no_config(tmp_path: Path) -> None:
    message = refused(tmp_path, "datasets:\n  - {json_path: a.jsonl}\n")
    path = tmp_path / "run.yaml"
    assert f"is a mixture of data sets, not a config: put `mixture: {path}` into" in message
    assert "job: this key is required" in refused(tmp_path, "splits: 3\n")


def test_missing_and_binary_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml: cannot be read"):
        load_config(tmp_path / "nothing.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.yaml: cannot be read"):
        load_config(tmp_path / "binary.yaml")


# ---- paths ---------------------------------------------------------------------------------------


def test_paths_expand_variables_home_and_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATA", "/data")
    monkeypatch.setenv("N", "7")
    monkeypatch.setenv("HOME", "/home/me")
    text = """\
job: j
index_dir: ~/index
state_dir: $DATA/state
sources:
  - name: a
    records: ["${DATA}/x$N/*.jsonl", "../rel/*.jsonl", "s3://bucket/${N}/*.jsonl"]
    images: imgs
tokenizer: {file: tok/tokenizer.json}
"""
    config = load(tmp_path, text)
    assert config.index_dir == "/home/me/index"
    assert config.state_dir == "/data/state"
    assert config.sources[0].records == (
        "/data/x7/*.jsonl",
        os.path.normpath(tmp_path / "../rel/*.jsonl"),
        "s3://bucket/7/*.jsonl",
    )
    assert config.sources[0].images == (str(tmp_path / "imgs"),)
    assert config.text.tokenizer == str(tmp_path / "tok/tokenizer.json")


def test_relative_paths_do_not_depend_on_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, MINIMAL)
    monkeypatch.chdir(tmp_path)
    here = load_config("run.yaml")
    monkeypatch.chdir("/")
    assert load_config(tmp_path / "run.yaml") == here


@pytest.mark.parametrize("path", ["$NOT_SET/x", "a/${NOT_SET}"])
def test_undefined_variable_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.delenv("NOT_SET", raising=False)
    message = refused(tmp_path, MINIMAL.replace("index_dir: index", f"index_dir: {path}"))
    assert "run.yaml:2: index_dir: the environment variable NOT_SET is not set" in message


# ---- sources -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "exact"),
    [("0.3", "0.3"), ("1/3", "1/3"), ("2", "2"), ('"0.10"', "0.10"), ("0.1", "0.1")],
)
def test_weights_and_repeats_stay_exact(tmp_path: Path, written: str, exact: str) -> None:
    endless = (
        MINIMAL.replace("records:", f"weight: {written}, records:") + "plan: {epochs: endless}\n"
    )
    assert load(tmp_path, endless).plan.sources[0].weight == exact
    assert load(tmp_path, endless).plan.epochs is None
    finite = MINIMAL.replace("records:", f"repeat: {written}, records:") + "plan: {epochs: 3}\n"
    assert load(tmp_path, finite).plan.sources[0].repeat == exact


@pytest.mark.parametrize("written", ["0", "-1", "1/0", "x", "true", ".nan", ".inf"])
def test_weights_that_are_none_are_refused(tmp_path: Path, written: str) -> None:
    text = MINIMAL.replace("records:", f"weight: {written}, records:") + "plan: {epochs: endless}\n"
    assert "sources[0].weight: " in refused(tmp_path, text)


def test_weight_and_repeat_go_with_the_kind_of_run(tmp_path: Path) -> None:
    weighted = MINIMAL.replace("records:", "weight: 1, records:")
    assert "sources[0].weight: counts in endless runs only" in refused(tmp_path, weighted)
    repeated = MINIMAL.replace("records:", "repeat: 1, records:") + "plan: {epochs: endless}\n"
    assert "sources[0].repeat: counts in finite runs only" in refused(tmp_path, repeated)
    two = MINIMAL + "  - {name: b, records: b.jsonl, weight: 1}\nplan: {epochs: endless}\n"
    assert "sources[0].weight: is required" in refused(tmp_path, two)


def test_source_names_are_unique_and_plain(tmp_path: Path) -> None:
    assert "the name a stands here twice" in refused(
        tmp_path, MINIMAL + "  - {name: a, records: b.jsonl}\n"
    )
    assert "sources[0].name: " in refused(tmp_path, MINIMAL.replace("name: a", "name: a/b"))


def test_every_source_has_its_own_placeholders(tmp_path: Path) -> None:
    other = MINIMAL + '  - {name: b, records: b.jsonl, placeholder: ["<img>", "<image_{n}>"]}\n'
    formats = [source.format for source in load(tmp_path, other).sources]
    assert formats[0].placeholders == ("<image>",)
    assert formats[1].placeholders == ("<img>", "<image_{n}>")
    empty = MINIMAL + '  - {name: b, records: b.jsonl, placeholder: ""}\n'
    assert "sources[1].placeholder[0]: " in refused(tmp_path, empty)


# ---- sizes, secrets ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512 MiB", 512 * 2**20),
        ("20 GB", 20 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("7", 7),
        ("2k", 2000),
        (" 1 TB ", 10**12),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("url", ["https://me:hunter2@host/a.jsonl", "s3://b/a?sig=hunter2&v=1"])
def test_a_credential_in_a_url_is_refused_and_not_shown(tmp_path: Path, url: str) -> None:
    message = refused(tmp_path, MINIMAL.replace("a/*.jsonl", f'"{url}"'))
    assert "sources[0].records[0]: this URL holds a credential" in message
    assert "hunter2" not in message


def test_error_texts_show_no_secret(tmp_path: Path) -> None:
    message = refused(tmp_path, MINIMAL + "serving: {host: 3, api_key: hunter2}\n")
    assert "serving.api_key: unknown key" in message
    assert "hunter2" not in message
    message = refused(tmp_path, MINIMAL + "tokenizer: {template: 's3://me:hunter2@b/x'}\n")
    assert "s3://***@b/x" in message
    assert "hunter2" not in message


def test_workers_are_sized_by_the_machine_unless_the_config_says_otherwise(tmp_path: Path) -> None:
    for text in ("", "workers: {count: auto, decode_threads: auto}\n"):
        config = load(tmp_path, MINIMAL + text)
        assert (config.workers.count, config.workers.decode_threads) == (None, None)
        assert config_from_json(config_to_json(config)) == config
    config = load(tmp_path, MINIMAL + "workers: {count: 3, decode_threads: 8}\n")
    assert (config.workers.count, config.workers.decode_threads) == (3, 8)
    for text, value in (("", "cores"), ("workers: {autoscale: false}\n", False)):
        config = load(tmp_path, MINIMAL + text)
        assert config.workers.autoscale is value or config.workers.autoscale == value
        assert config_from_json(config_to_json(config)) == config
    assert "min 5 is more than max 2" in refused(tmp_path, MINIMAL + "workers: {min: 5, max: 2}\n")
    assert "num_cpus 0 with autoscale nodes" in refused(
        tmp_path, MINIMAL + "workers: {autoscale: nodes, num_cpus: 0}\n"
    )
    assert "between min 4 and max 64" in refused(
        tmp_path, MINIMAL + "workers: {count: 3, min: 4}\n"
    )

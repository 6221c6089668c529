"""Nothing that the service or the client reads from others can run code: no module of theirs names
what would."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("dataservice", "trainer_client")

MODULES = {"pickle", "cPickle", "_pickle", "marshal", "dill", "cloudpickle", "shelve", "joblib"}
"""That may not be imported, in whatever way."""
CALLS = {
    "eval",
    "exec",
    "__import__",
    "yaml.load",
    "yaml.load_all",
    "yaml.unsafe_load",
    "yaml.full_load",
    "np.load",
    "numpy.load",
    "torch.load",
    "pandas.read_pickle",
}
COLLECTIVES = {"broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"}
"""Of torch.distributed: they pickle."""
SAFE = {
    "torch.load": "weights_only",
    "np.load": "allow_pickle",
    "numpy.load": "allow_pickle",
}
"""Allowed with that keyword: True of torch's, False of numpy's."""
ALLOWED: set[tuple[str, str]] = set()
"""(file, what) that may be there all the same, with a reason beside it. Ray pickles what one actor
calls another with; it does so in its own code, behind its own token."""


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def _is_safe(node: ast.Call, name: str) -> bool:
    keyword = SAFE.get(name)
    wanted = keyword == "weights_only"
    return any(
        one.arg == keyword and isinstance(one.value, ast.Constant) and one.value.value is wanted
        for one in node.keywords
        if keyword is not None
    )


def unsafe_words(code: str) -> Iterator[str]:
    """What in it could run code that it reads."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield str(node.module)
        elif isinstance(node, ast.Call):
            name = _dotted(node.func)
            last = name.rpartition(".")[2]
            if (name in CALLS and not _is_safe(node, name)) or last in COLLECTIVES:
                yield name
            yield from (
                "allow_pickle=True"
                for one in node.keywords
                if one.arg == "allow_pickle"
                and not (isinstance(one.value, ast.Constant) and one.value.value is False)
            )


def test_no_module_reads_what_could_run() -> None:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert len(files) > 200
    found = {
        (str(path.relative_to(ROOT)), word)
        for path in files
        for word in unsafe_words(path.read_text(encoding="utf-8"))
    }
    assert found == ALLOWED


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import pickle", ["pickle"]),
        ("def f():\n  import marshal as m", ["marshal"]),
        ("from dill.source import x", ["dill.source"]),
        ("torch.load(p)", ["torch.load"]),
        ("torch.load(p, weights_only=False)", ["torch.load"]),
        ("torch.load(p, weights_only=True)", []),
        ("np.load(p)", ["np.load"]),
        ("np.load(p, allow_pickle=False)", []),
        ("np.savez(p, allow_pickle=True)", ["allow_pickle=True"]),
        ("yaml.load(x, Loader=yaml.SafeLoader)", ["yaml.load"]),
        ("yaml.safe_load(x)", []),
        ("x.eval()", []),
        ("eval('1')", ["eval"]),
        ("dist.all_gather_object(a, b)", ["dist.all_gather_object"]),
    ],
)
def test_such_words_are_seen(code: str, words: list[str]) -> None:
    assert list(unsafe_words(code)) == words

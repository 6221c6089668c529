"""The plan is the same with numba, with its compiler switched off, and without it."""

from __future__ import annotations

import hashlib
import itertools
import os
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from support.uncompiled import printed_by

from dataservice.core.balance import assign
from dataservice.core.compiled import cache_folder, has_compiler
from dataservice.core.packing import PackRules, pack
from dataservice.core.settings import Packer


def fingerprint() -> str:
    """A hash over what every compiled function decides."""
    rng = np.random.Generator(np.random.Philox(5))
    seen = hashlib.sha256()
    length = rng.integers(1, 400, 300)
    images = np.where(rng.random(300) < 0.4, np.minimum(length, rng.integers(0, 200, 300)), 0)
    for packer in get_args(Packer):
        for cap in (None, 250):
            rules = PackRules(
                packer=packer,
                pack_length=512,
                image_token_cap=cap,
                image_cap=cap and 3,
                reference_ranks=8,
                reference_micro_steps=4,
            )
            packing = pack(
                length, images, images * 4, np.minimum(images, 1), images * images, rules
            )
            seen.update(packing.order.tobytes() + packing.offsets.tobytes())
    for domain, k, least, tolerance in itertools.product((8, 4, 1), (1, 2), (0, 1), (0.0, 0.05)):
        count = 8 * 6 * k
        placed = assign(
            rng.integers(0, 50, count) * 1000,
            rng.integers(-1, 4, count),
            dp_size=8,
            micro_steps=6,
            ranks_per_node=2,
            sync_domain=domain,
            packs_per_cell=k,
            tolerance=tolerance,
            num_images=rng.integers(0, 3, count),
            min_images_per_rank=least,
        )
        seen.update(placed.micro_step.tobytes() + placed.dp_rank.tobytes())
    return seen.hexdigest()


WITHOUT_JIT = (
    "import dataservice.core.balance.swaps as s; assert not hasattr(s.swap_in_rows, 'py_func')"
)
WITHOUT_NUMBA = "import sys; sys.modules['numba'] = None"


@pytest.mark.parametrize(
    ("first", "disable"), [(WITHOUT_JIT, "1"), (WITHOUT_NUMBA, "0")], ids=["jit off", "no numba"]
)
def test_same_without_compiling(first: str, disable: str) -> None:
    code = f"{first}\nfrom tests.core.test_compiled import fingerprint\nprint(fingerprint())"
    assert printed_by(code, disable_jit=disable) == fingerprint()


def test_what_is_compiled_of_other_sources_is_not_used(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    helper = package / "helper.py"
    helper.write_text("one")
    folders = []
    for text in ("one", "two"):
        helper.write_text(text)
        cache_folder.cache_clear()
        folders.append(cache_folder(package, ""))
        assert folders[-1] is not None
        assert Path(folders[-1]).parent == package / "__pycache__"
        chosen = cache_folder(package, str(tmp_path / "mine"))
        assert chosen is not None
        assert Path(chosen).parent == tmp_path / "mine"
    assert folders[0] != folders[1]
    cache_folder.cache_clear()
    assert cache_folder(package, str(helper)) is None


def test_a_user_without_a_home_gets_no_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    package = tmp_path / "file"
    package.write_text("no folder can be made in it")
    cache_folder.cache_clear()
    assert cache_folder(package, "") is None
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


_SUM = """
import os
from pathlib import Path
from dataservice.core.compiled import compiled
from tests.core.test_compiled import added
{before}
print(compiled(added)(1, 2))
"""
_DISK_IS_FULL = """
def full(*_):
    raise OSError(28, "No space left on device")
os.replace = full
"""


def added(a: int, b: int) -> int:
    return a + b


@pytest.mark.skipif(not has_compiler(), reason="numba compiles nothing here")
@pytest.mark.parametrize("ending", ["nbi", "nbc"])
def test_a_damaged_cache_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    ask = _SUM.format(before="")
    assert printed_by(ask, disable_jit="0") == "3"
    (kept,) = tmp_path.rglob(f"*added*.{ending}")
    whole = kept.read_bytes()
    kept.write_bytes(b"")
    assert printed_by(ask, disable_jit="0") == "3"
    assert len(kept.read_bytes()) == len(whole)


@pytest.mark.skipif(not has_compiler(), reason="numba compiles nothing here")
def test_a_cache_that_cannot_be_written_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert printed_by(_SUM.format(before=_DISK_IS_FULL), disable_jit="0") == "3"
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]

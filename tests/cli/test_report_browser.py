"""The report of a simulation in headless Chromium: every plot has marks, nothing is loaded."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.simulation import random_report

from dataservice.cli import main
from dataservice.cli.simulate_report import page
from dataservice.core.settings import Grid

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium here; deploy/install_browser.sh installs it on Debian"
)

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
WATCH = """<script>
const refused = [];
document.addEventListener("securitypolicyviolation", event => refused.push(event.blockedURI));
addEventListener("load", () => {
  const seen = shape => {
    const box = shape.getBoundingClientRect(), style = getComputedStyle(shape);
    const drawn = style.fill !== "none" || style.stroke !== "none";
    return drawn && style.visibility === "visible" && Math.max(box.width, box.height) > 0;
  };
  const pictures = [...document.querySelectorAll("svg[role=img]")].map(svg => ({
    label: svg.getAttribute("aria-label"),
    width: svg.getBoundingClientRect().width,
    height: svg.getBoundingClientRect().height,
    marks: [...svg.querySelectorAll("path, rect:not(.row):not(.track), polyline, polygon, circle")]
      .filter(seen).length,
    colours: new Set([...svg.querySelectorAll("path, rect:not(.row), polygon, circle")]
      .map(shape => getComputedStyle(shape).fill)).size,
  }));
  const root = document.documentElement;
  const found = {
    pictures, refused,
    loaded: performance.getEntriesByType("resource").map(entry => entry.name),
    overflow: root.scrollWidth - root.clientWidth,
    page: getComputedStyle(document.body).backgroundColor,
  };
  root.dataset.found = JSON.stringify(found);
});
</script>"""


def opened(html: str, folder: Path, *options: str) -> dict[str, Any]:
    """What the browser found in the page, a watching script let in."""
    assert html.count(POLICY) == 1
    watched = html.replace(POLICY, POLICY + "; script-src 'unsafe-inline'")
    file = folder / "watched.html"
    file.write_text(watched.replace("<title>", f"{WATCH}<title>", 1), encoding="utf-8")
    assert BROWSER is not None
    dumped = subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={folder / 'profile'}",
            *options,
            "--dump-dom",
            file.as_uri(),
        ],
        check=True,
        capture_output=True,
        encoding="utf-8",
        timeout=90,
    ).stdout
    written = re.search(r'data-found="([^"]*)"', dumped)
    assert written is not None
    found: dict[str, Any] = json.loads(written[1].replace("&quot;", '"').replace("&amp;", "&"))
    return found


def test_every_plot_has_marks_and_nothing_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    with pytest.raises(SystemExit) as stopped:
        grid = ("--dp-size", "1024", "--micro-steps", "16")
        main(["simulate", "--synthetic", "text80", *grid, "--html", str(file)])
    assert stopped.value.code == 0
    found = opened(file.read_text(encoding="utf-8"), tmp_path)
    assert (found["loaded"], found["refused"]) == ([], [])
    assert found["overflow"] == 0
    assert len(found["pictures"]) == 5
    for picture in found["pictures"]:
        assert picture["width"] > 100 and picture["height"] > 100, picture["label"]
        assert picture["marks"] >= 7, picture["label"]
        assert picture["colours"] >= 2, picture["label"]


def test_a_narrow_dark_page_has_the_same_plots(tmp_path: Path) -> None:
    html = page(random_report(Grid(dp_size=64, micro_steps=8)))
    light = opened(html, tmp_path)
    dark = opened(
        html, tmp_path, "--window-size=500,900", "--blink-settings=preferredColorScheme=0"
    )
    assert [p["marks"] for p in dark["pictures"]] == [p["marks"] for p in light["pictures"]]
    assert max(p["width"] for p in dark["pictures"]) < 500
    assert dark["overflow"] == 0
    assert dark["page"] != light["page"]


def test_a_page_that_loaded_something_would_be_noticed(tmp_path: Path) -> None:
    html = page(random_report(Grid(dp_size=8, micro_steps=2)))
    found = opened(html.replace("<main>", '<main><img src="http://127.0.0.1:9/x.png">'), tmp_path)
    assert found["refused"] == ["http://127.0.0.1:9/x.png"]

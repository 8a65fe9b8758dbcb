"""The HTML report in a real browser: it asks nobody for anything, every plot is drawn, and no text is cut off."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from eyas_serve.acceptance import DEFINITION
from eyas_serve.client import Generation
from eyas_serve.html import page, top
from eyas_serve.levels import Arm, compare, summarise_level
from eyas_serve.prompts import Prompt

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
LEVELS = (1, 4, 16, 64)
# No name is looked up, so that the browser's own requests go nowhere; the page's stand in the log all the same.
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions",
         "--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND", "--window-size=1200,900")
LOOK = """<script>
const box = e => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom].map(Math.round); };
const plots = [...document.querySelectorAll("svg")].map(svg => ({
  frame: box(svg), title: svg.querySelector("title").textContent,
  marks: [...svg.querySelectorAll("polyline,rect")].map(box), words: [...svg.querySelectorAll("text")].map(box)}));
const out = document.createElement("pre");
out.id = "look";
out.textContent = JSON.stringify({plots, width: innerWidth, needed: document.documentElement.scrollWidth,
  loaded: performance.getEntriesByType("resource").map(entry => entry.name)});
document.body.append(out);
</script>"""


def report() -> dict[str, Any]:
    """Of answers made up here: large and small numbers, two data sets, a comparison."""
    prompts = [Prompt(str(i), (1, 2), "gsm8k" if i < 4 else "a <long> name of a data set") for i in range(8)]
    rows = []
    for arm, histogram in (("draft", (2, 1, 1, 1)), ("target alone", ())):
        for level in LEVELS:
            answers = tuple(Generation(tuple(range(100)), histogram, 0.2 + 0.01 * i, "length", 0.01) for i in range(8))
            rows += summarise_level(Arm(arm, level, answers, 0.8 / level), prompts)
    return {"engine": {"name": "SGLang", "version": "0.5.16"}, "definition": DEFINITION, "levels": rows,
            "outputs_identical": True, "against": {"report": "old.json", "rows": compare(rows, rows)},
            "config": {"target": "/models/" + "x" * 200, "tp": 8}}


def browse(text: str, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """What the page looks like once drawn, and every address that it asked for, its own file excepted."""
    assert CHROMIUM is not None
    file, log = folder / "report.html", folder / "net.json"
    file.write_text(text.replace("</body>", LOOK + "</body>"), encoding="utf-8")
    words = [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'profile'}", f"--log-net-log={log}", "--dump-dom",
             file.as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True,
                          env={**os.environ, "HOME": str(folder)})
    found = re.search(r'<pre id="look">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr
    facts = [event.get("params", {}) for event in json.loads(log.read_text(encoding="utf-8"))["events"]]
    asked = {fact["url"] for fact in facts if "url" in fact and fact.get("initiator", "not an origin")
             != "not an origin"}
    return json.loads(html.unescape(found[1])), sorted(asked)


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt-get install chromium)")


@needs_chromium
def test_in_headless_chromium(tmp_path: Path) -> None:
    look, asked = browse(page(report()), tmp_path)
    assert asked == look["loaded"] == []
    assert look["needed"] <= look["width"], "the page is wider than the window"
    assert len(look["plots"]) == 6
    for plot in look["plots"]:
        left, above, right, below = plot["frame"]
        assert right - left > 300, plot["title"]
        assert plot["marks"], plot["title"]
        for box in plot["marks"] + plot["words"]:
            assert left <= box[0] <= box[2] <= right, plot["title"]
            assert above <= box[1] <= box[3] <= below, plot["title"]


@needs_chromium
def test_the_check_sees_what_is_wrong(tmp_path: Path) -> None:
    text = page(report()).replace("</h1>", '</h1><img src="http://127.0.0.1:9/x.png">')
    wide = text.replace("<table", '<table style="width:3000px"', 1).replace(".wide{overflow-x:auto;", ".w{")
    look, asked = browse(wide, tmp_path)
    assert asked == ["http://127.0.0.1:9/x.png"]
    assert look["needed"] > look["width"]


def test_a_comparison_names_the_settings_that_differ() -> None:
    other = report()
    other["against"]["settings"] = ["steps 3, before 5", "dtype <auto>, before float32"]
    text = page(other)
    assert "Other settings: steps 3, before 5." in text
    assert "dtype &lt;auto&gt;, before float32" in text


@pytest.mark.parametrize("most", [0.0, 1e-9, 0.0012, 0.3, 0.95, 1.0, 1.76, 9.6, 57.0, 13370.0])
def test_the_top_of_an_axis_is_near_above(most: float) -> None:
    assert most < top(most) <= max(1.6 * most, 1.0)

"""The table of codes, the document and the checks name the same findings."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from eyas_contract import engines
from eyas_contract.engines.codes import CODES

ROOT = Path(__file__).resolve().parents[2]
LEVELS = ["note", "warning", "error"]


def written() -> dict[str, set[str]]:
    """Codes in the source of the checks -> severities given beside them."""
    result: dict[str, set[str]] = {}
    for path in Path(engines.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Finding" and node.args:
                codes, levels = ([n.value for n in ast.walk(argument) if isinstance(n, ast.Constant)
                                  and isinstance(n.value, str)] for argument in node.args[:2])
                for code in codes:
                    result.setdefault(code, set()).update(level for level in levels if level in LEVELS)
    return result


def probed() -> set[str]:
    """Codes in the sources of the probe and of extraction's check of loose files."""
    packages = ROOT / "packages"
    paths = [*(packages / "serve" / "src" / "eyas_serve" / "probe").glob("*.py"),
             packages / "extract" / "src" / "eyas_extract" / "loose.py"]
    return {node.value for path in paths for node in ast.walk(ast.parse(path.read_text("utf-8")))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
            and re.fullmatch(r"(probe|states)-[a-z-]+[a-z]", node.value)}


def test_every_code_of_the_checks_is_in_the_table() -> None:
    indirect = {"tokenizer-differs", "template-differs"}  # named in a table of the training room
    found = {code for code in written() if re.fullmatch(r"[a-z0-9-]+", code) and code not in ("tok",)}
    assert found | indirect | probed() == set(CODES)


def test_the_table_gives_the_worst_severity() -> None:
    for code, levels in written().items():
        if code in CODES and levels:
            worst = max(levels, key=LEVELS.index)
            assert CODES[code][0] == worst, code


def test_the_document_is_the_table() -> None:
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| (\w+) \| (.+) \|$", (ROOT / "docs" / "findings.md").read_text(), re.M)
    assert {code: (severity, meaning) for code, severity, meaning in rows} == CODES
    assert [code for code, _, _ in rows] == sorted(CODES)

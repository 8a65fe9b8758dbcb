"""Each distribution builds a wheel and works alone: contract and native with nothing beside them, the others with
what they declare. torch comes from the interpreter that runs the tests, through a .pth file, never from an index."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent.parent
PACKAGES = {"eyas-contract": ROOT / "packages/contract", "eyas-extract": ROOT / "packages/extract",
            "eyas-draft": ROOT / "packages/draft", "eyas-serve": ROOT / "packages/serve", "eyas-native": ROOT}
MAY_NEED_TORCH = {"eyas-extract", "eyas-draft"}


def call(*words: object) -> str:
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A wheel of every distribution."""
    out = tmp_path_factory.mktemp("wheels")
    for folder in PACKAGES.values():
        extra = ["-Ccmake.define.EYAS_CUDA=OFF"] if folder == ROOT else []
        call(sys.executable, "-m", "build", "--wheel", "--no-isolation", *extra, "--outdir", out, folder)
    return {name: next(out.glob(f"{name.replace('-', '_')}-*.whl")) for name in PACKAGES}


def environment(folder: Path, *, with_parent: bool) -> Path:
    """A fresh virtual environment's python; with_parent shows it the packages of the running one."""
    venv.create(folder, with_pip=False, clear=True)
    python = folder / "bin" / "python"
    if with_parent:
        site = call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
        (Path(site) / "parent.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return python


def install(python: Path, *files: Path) -> None:
    call(sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, "install", "--quiet",
         "--no-index", "--no-deps", "--ignore-installed", *files)


def requirements(wheel: Path) -> list[Requirement]:
    """What a wheel's metadata asks for without extras."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode("utf-8"))
    parsed = [Requirement(text) for text in metadata.get_all("Requires-Dist") or []]
    return [r for r in parsed if r.marker is None or r.marker.evaluate({"extra": ""})]


@pytest.mark.parametrize("name", ["eyas-contract", "eyas-native"])
def test_alone_in_an_empty_environment(wheels: dict[str, Path], tmp_path: Path, name: str) -> None:
    assert requirements(wheels[name]) == []
    python = environment(tmp_path / "venv", with_parent=False)
    install(python, wheels[name])
    module = name.replace("-", "_")
    assert call(python, "-c", f"import {module}; print({module}.__version__)").strip() == declared(name)


@pytest.mark.parametrize("name", ["eyas-extract", "eyas-draft", "eyas-serve"])
def test_runs_on_wheels_of_its_declared_needs(wheels: dict[str, Path], tmp_path: Path, name: str) -> None:
    needs = {r.name for r in requirements(wheels[name])}
    siblings = sorted(n for n in needs if n.startswith("eyas-"))
    assert set(siblings) <= {"eyas-contract", "eyas-native"}
    assert ("torch" in needs) == (name in MAY_NEED_TORCH)
    python = environment(tmp_path / "venv", with_parent=True)
    install(python, wheels[name], *(wheels[s] for s in siblings))
    script = python.parent / name
    assert "usage" in call(script, "--help").lower()
    where = call(python, "-c", f"import {name.replace('-', '_')} as m; print(m.__file__)").strip()
    assert where.startswith(str(tmp_path))


@pytest.mark.parametrize("name", sorted(PACKAGES))
def test_metadata(wheels: dict[str, Path], name: str) -> None:
    """Ranges between siblings admit the versions in this tree; types are shipped; the changelog knows the version."""
    for requirement in requirements(wheels[name]):
        if requirement.name.startswith("eyas-"):
            assert requirement.specifier.contains(declared(requirement.name)), requirement
            assert not any(s.operator == "==" for s in requirement.specifier)
    with zipfile.ZipFile(wheels[name]) as archive:
        assert f"{name.replace('-', '_')}/py.typed" in archive.namelist()
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"### {declared(name)}" in changelog.split(f"## {name}\n")[1].split("\n## ")[0]


def declared(name: str) -> str:
    """The version in a distribution's pyproject.toml; eyas-native's, which may get a +cu130, stands in its package."""
    with (PACKAGES[name] / "pyproject.toml").open("rb") as source:
        project = tomllib.load(source)["project"]
    if name != "eyas-native":
        return str(project["version"])
    package = (ROOT / "native/python/eyas_native/__init__.py").read_text(encoding="utf-8")
    return package.split('__version__ = "')[1].split('"')[0]

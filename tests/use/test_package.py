"""What is built is what is used: a wheel and an sdist, installed apart, plan and say their version."""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

import autopar

HERE = pathlib.Path(__file__).parents[2]
DATA = (
    "py.typed",
    "sharding/clusters/h100.json",
    "commands/models.json",
    "solver/plan.schema.json",
    "report/page.html",
)
USE = """
import importlib.metadata, torch, autopar
from autopar.commands.models import shipped
assert autopar.__file__.startswith({where!r}), autopar.__file__
plan = autopar.plan(torch.nn.Linear(8, 8), (torch.ones(4, 8),), mesh=2, cluster="h100-8x1")
print(importlib.metadata.version("autopar"), plan.mesh.size, len(shipped()))
"""


def pip(*arguments):
    made = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments],
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert made.returncode == 0, made.stderr[-2000:]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    source = tmp_path_factory.mktemp("source") / "autopar"
    leave = shutil.ignore_patterns(
        ".git", ".venv*", "__pycache__", ".*_cache", ".hypothesis", "site", "build", "*.egg-info"
    )
    shutil.copytree(HERE, source, ignore=leave)  # a build leaves folders behind
    pip("wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(source))
    build = f"from setuptools.build_meta import build_sdist; build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True, timeout=100)
    return folder


@pytest.mark.nightly
def test_a_source_distribution_has_what_the_page_of_the_package_names(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    assert {
        "CHANGELOG.md",
        "Makefile",
        "docs/index.md",
        "docs/site.py",
        "mkdocs.yml",
        "tests/use/test_package.py",
    } <= names
    assert {"examples/demo.py", "benchmarks/planning.md", "tools/form.py", "tests/golden/gpt2-free.txt"} <= names
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


@pytest.mark.timeout(240)
def test_a_wheel_is_installed_and_plans(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
        about = files.read(next(n for n in names if n.endswith("METADATA"))).decode()
    assert all(f"autopar/{name}" in names for name in DATA)
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "examples/"))]
    assert "Author: The autopar authors" in about and "rich" not in about
    assert not re.findall(r"\]\((?!https?://)", about)  # a link between files leads nowhere on an index
    assert "License-Expression: Apache-2.0" in about and any(name.endswith("licenses/LICENSE") for name in names)
    where = str(tmp_path / "site")
    pip("install", "--quiet", "--no-deps", "--target", where, str(wheel))
    made = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {where!r}){USE.format(where=where)}"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert made.returncode == 0, made.stderr[-2000:]
    version, devices, models = made.stdout.split()
    assert (version, devices) == (autopar.__version__, "2") and int(models) > 10

"""What several tests use is in a helper module: no file imports from a test file."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1]
FOLDERS = ("tests", "benchmarks", "examples")
IMPORTS = (
    "from tests.ops.test_rules import prove",
    "def f():\n    from tests.ops import test_rules",
    "import tests.ops.test_rules",
    "from .test_rules import prove",
)


def imported(source: str) -> set[str]:
    """Full names of what a source imports, at its top and inside functions."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names}
    return found


def from_tests(source: str) -> list[str]:
    """Those of the names that lie in a test file."""
    return [
        name
        for name in imported(source)
        if name.startswith(("tests.", ".")) and any(part.startswith("test_") for part in name.split("."))
    ]


def test_nothing_is_imported_from_a_test_file():
    files = [path for folder in FOLDERS for path in sorted((HERE / folder).rglob("*.py"))]
    found = {str(path.relative_to(HERE)): from_tests(path.read_text()) for path in files}
    assert files and not {path: names for path, names in found.items() if names}


@pytest.mark.parametrize("source", IMPORTS)
def test_an_import_from_a_test_file_is_noticed(source):
    assert from_tests(source)

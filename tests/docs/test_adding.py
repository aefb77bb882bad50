"""docs/adding.md can be followed from the page alone: each section is a program of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.docs.blocks import HERE, sections

EXAMPLES = sections("docs/adding.md")


@pytest.mark.parametrize("title", EXAMPLES)
def test_a_section_runs_as_it_stands(title):
    ran = subprocess.run([sys.executable, "-c", EXAMPLES[title]], cwd=HERE, capture_output=True, text=True, timeout=150)
    assert ran.returncode == 0, ran.stderr[-3000:]


def test_every_section_has_an_example():
    assert len(EXAMPLES) == (HERE / "docs/adding.md").read_text().count("\n## ")

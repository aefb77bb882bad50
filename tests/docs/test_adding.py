"""docs/adding.md can be followed from the page alone: each section is a program of its own."""

from __future__ import annotations

import pytest

from tests import fresh
from tests.docs.blocks import HERE, sections

EXAMPLES = sections("docs/adding.md")


@pytest.mark.parametrize("title", EXAMPLES)
def test_a_section_runs_as_it_stands(title, tmp_path):
    status, said = fresh.run(EXAMPLES[title], HERE, tmp_path / "stderr")
    assert status == 0, said[-3000:]


def test_every_section_has_an_example():
    assert len(EXAMPLES) == (HERE / "docs/adding.md").read_text().count("\n## ")

"""Pages keep 120 columns, and what they link to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2]
PAGES = sorted(p for folder in (".", "docs", "docs/design", "benchmarks") for p in (HERE / folder).glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(HERE)))
def test_a_page_keeps_120_columns_outside_of_tables(page):
    lines = enumerate(page.read_text().splitlines(), 1)
    wide = [f"{page.name}:{i}" for i, line in lines if len(line) > 120 and not line.startswith("|")]
    assert not wide


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(HERE)))
def test_links_of_a_page_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
    assert not [link for link in links if "://" not in link and not (page.parent / link).exists()]

"""Pages for users: their code runs, they keep 120 columns, and what they name is there."""

from __future__ import annotations

import re

import pytest

from tests.docs.blocks import HERE, sections

GUIDES = ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in sorted((HERE / "docs").glob("*.md")))]
PAGES = [
    *GUIDES,
    "CHANGELOG.md",
    *(f"{folder}/{p.name}" for folder in ("docs/design", "benchmarks") for p in sorted((HERE / folder).glob("*.md"))),
]


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        *(f"docs/{name}.md" for name in ("index", "reading", "capture", "planning", "memory", "training", "trainers")),
    ],
)
def test_the_code_of_a_page_runs_as_it_stands(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile("\n".join(sections(page).values()), page, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("page", PAGES)
def test_a_page_keeps_120_columns_outside_of_tables(page):
    lines = enumerate((HERE / page).read_text().splitlines(), 1)
    assert not [f"{page}:{i}" for i, line in lines if len(line) > 120 and not line.startswith("|")]


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", (HERE / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert not [link for link in links if not _is_there(page, *link.partition("#")[::2])]


def _is_there(page, path, heading):
    """Is there such a file, and such a heading in it?"""
    target = ((HERE / page).parent / path).resolve() if path else HERE / page
    if not target.exists():
        return False
    titles = re.findall(r"^#+ (.*)$", target.read_text(), flags=re.MULTILINE) if heading else []
    return not heading or heading in [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


@pytest.mark.parametrize("page", GUIDES)
def test_files_that_a_guide_names_are_there(page):
    named = re.findall(r"`((?:autopar|tests|docs|examples|benchmarks)/[\w./-]*)`", (HERE / page).read_text())
    assert not [path for path in named if not (HERE / path).exists()]

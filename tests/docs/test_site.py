"""The pages as a site: it is built without network, nothing in it is fetched, and every error has a line."""

from __future__ import annotations

import html
import re
import subprocess
import sys

from autopar import letters
from autopar.letters import Letter
from tests.docs.blocks import HERE


def test_the_site_is_built_and_fetches_nothing(tmp_path):
    """Strict: a link that leads nowhere, or a name of the reference that is not there, is an error."""
    made = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")],
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert made.returncode == 0, made.stderr[-3000:]
    for name in ("index", "idea", "reading", "letters", "api", "limits", "benchmarks/published"):
        page = (tmp_path / "site" / f"{name}.html").read_text()
        assert not re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="https?://', page), name
    reference = (tmp_path / "site" / "api.html").read_text()
    signatures = re.findall(r'<div class="[^"]*doc-signature.*?</pre>', reference, re.DOTALL)
    shown = [html.unescape(re.sub(r"<[^>]+>", "", text)) for text in signatures]
    assert any(text.startswith("plan(\n    model: Module,\n") for text in shown)
    assert max(len(line) for text in shown for line in text.splitlines()) <= 120
    for file in ("search/search_index.js", "web/iframe-worker.min.js"):  # scripts, which a page in a folder may load
        assert (tmp_path / "site" / file).is_file()
    assert "<title>An automatic-parallelism compiler" in (tmp_path / "site" / "index.html").read_text()
    for name in ("autoparallelize", "DeviceMesh", "step_interval_s", "Infeasible", "StepTimeline"):
        assert name in reference


def test_every_letter_has_a_line():
    page = (HERE / "docs" / "letters.md").read_text()
    kinds = [name for name, of in vars(letters).items() if isinstance(of, type) and issubclass(of, Letter)]
    assert not [name for name in kinds if name not in ("AutoparError", "Letter") and f"| `{name}` |" not in page]

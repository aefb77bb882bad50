"""The page that follows a weight and an activation: each block prints what the page says."""

from __future__ import annotations

import contextlib
import io
import re

from tests.docs.blocks import HERE

PAGE = HERE / "docs" / "following.md"
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", flags=re.DOTALL | re.MULTILINE)


def printed() -> list[tuple[str, str]]:
    """What each block of code prints, beside what the page says it does; both without spaces at the ends of lines."""
    names = {"__name__": "__main__"}
    found = []
    for code, said in BLOCK.findall(PAGE.read_text()):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, str(PAGE), "exec"), names)
        lines = [line.rstrip() for line in out.getvalue().strip("\n").splitlines()]
        found.append(("\n".join(lines), said.strip("\n")))
    return found


def test_each_stage_prints_what_the_page_says():
    blocks = printed()
    assert len(blocks) == 7
    for given, said in blocks:
        assert given == said

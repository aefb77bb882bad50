"""The Python blocks of a page, section by section."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parents[2]


def sections(page: str) -> dict[str, str]:
    """The code of each section that has some: its blocks, one after the other."""
    found = {}
    for section in re.split(r"^## ", (HERE / page).read_text(), flags=re.MULTILINE):
        blocks = re.findall(r"^```python\n(.*?)^```", section, flags=re.DOTALL | re.MULTILINE)
        if blocks:
            found[section.partition("\n")[0]] = "\n".join(blocks)
    return found

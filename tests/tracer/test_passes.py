"""Passes keep where gradients flow: random graphs before and after each pass, against eager."""

from __future__ import annotations

from pathlib import Path

import autopar

HERE = Path(autopar.__file__).parent


def test_passes_change_readers_by_one_primitive():
    """`forward_past` refuses where shape, dtype or gradient would change."""
    files = [file for folder in ("graph", "tracer", "turns") for file in (HERE / folder).glob("*.py")]
    raw = {file.name for file in files for word in ("replace_all_uses", "replace_input") if word in file.read_text()}
    assert raw == {"rewriting.py"}

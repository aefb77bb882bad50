"""Plans and emitted code stay what they are, byte for byte.

An intended change is a diff of the text beside this file.
"""

from __future__ import annotations

import pytest
import torch

from tests.golden.cases import CASES, HERE
from tests.shares import by_day

LONG = ("gpt2-megatron-bf16", "llama-zero3-bf16", "t5-free")  # nightly; of what other texts have


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="the text is that of torch 2.13")
@pytest.mark.parametrize("name", by_day(CASES, *(name for name in CASES if name not in LONG)))
def test_a_plan_and_its_code_are_what_they_were(name):
    assert CASES[name].text() == (HERE / f"{name}.txt").read_text(), "python -m tests.golden.cases, and review the diff"

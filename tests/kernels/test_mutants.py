"""The check of numerics refuses a wrong kernel of each family."""

from __future__ import annotations

import importlib.util
import pathlib
from dataclasses import replace

import pytest
import torch

from tests.kernels.cases import CASES, is_near

WRONG = {  # a case, and what is written instead
    "rms_norm, odd columns": ("(tl.sum(dy * even) / columns)", "(tl.sum(dy * even) / BLOCK)"),
    "rms_norm, more rows than programs": (
        "start = tl.cast(row, tl.int64) * columns",
        "start = tl.cast(row, tl.int64) // 2 * columns",
    ),
    "layer_norm, odd columns": ("x = tl.where(inside, x - tl.sum(x) / columns, 0.0)", "x = x - tl.sum(x) / columns"),
    "rms_norm, more columns than one pass": ("tl.store(ROOT + row, root)", "tl.store(ROOT + row, root * 1.01)"),
    "gated by silu": ("(dy * u * slope)", "(dy * slope)"),
    "gelu_tanh": ("(dy * slope)", "(dy * slope * 0.99)"),
    "cross_entropy, some ignored": ("tl.where(target == ignored, 0.0, tl.load(DY)", "(tl.load(DY)"),
    "cross_entropy_part, smoothed": ("smoothing - 1.0", "-1.0"),
    "cross_entropy, smoothed": ("if SUMS:", "if not SUMS:"),
    "cross_entropy, more columns than a block": ("total * tl.exp(most - above) +", "total +"),
    "rotary": ("y1 = x1 * c1 + x2 * s2", "y1 = x1 * c1 - x2 * s2"),
    "rotary_pair, fewer keys": ("(dq, dk), cos, sin, is_back=True", "(dq, dk), cos, sin, is_back=False"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_caught(name, interpret, tmp_path):
    case, (right, wrong) = CASES[name], WRONG[name]
    source = pathlib.Path(case.module.__file__).read_text()
    assert right in source
    path = tmp_path / f"wrong_{case.family.name}.py"
    path.write_text(source.replace(right, wrong).replace('"autopar::', f'"wrong_{abs(hash(name))}::'))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert is_near(case, torch.float32)
    assert not is_near(replace(case, module=module), torch.float32)

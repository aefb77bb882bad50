"""The check of numerics refuses a wrong kernel of each family."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
from dataclasses import replace

import pytest
import torch

from autopar.kernels import rows
from tests.kernels.cases import CASES, is_near
from tests.shares import by_day

WRONG = {  # a case, and what is written instead
    "rms_norm, odd columns": ("(along * root / columns)", "(along * root / BLOCK)"),
    "rms_norm, more rows than programs": ("dw += tl.sum(dy * even", "dw = tl.sum(dy * even"),
    "layer_norm, odd columns": (
        "x = tl.where(inside, x - (tl.sum(x, 1) / columns)[:, None], 0.0)",
        "x = x - (tl.sum(x, 1) / columns)[:, None]",
    ),
    "rms_norm, wide": ("tl.store(ROOT + program, root)", "tl.store(ROOT + program, root * 1.01)"),
    "add_layer_norm, wide": ("dx = (dy - less - even * along)", "dx = (dy - even * along)"),
    "dropout": ("tl.where(bits >= least, x * factor, 0.0)", "tl.where(bits >= least, x, 0.0)"),
    "dropout, and a sum": ("bits >= least", "bits > least + 1000000000"),
    "masked_softmax": ("dy - tl.sum(y * dy, 1)[:, None]", "dy"),
    "masked_softmax of a mask a key": ("query.to(tl.int64) * of_query", "query.to(tl.int64)"),
    "masked_softmax, capped": ("1.0 - t * t", "1.0"),
    "masked_softmax, turned": ("-0.33333333333333333", "0.33333333333333333"),
    "gated by silu": ("(dy * u * slope)", "(dy * slope)"),
    "bias_gelu": ("sums += dx", "sums += dy"),
    "gelu_tanh": ("(dy * slope)", "(dy * slope * 0.99)"),
    "cross_entropy, some ignored": ("tl.where(target == ignored, 0.0, tl.load(DY)", "(tl.load(DY)"),
    "cross_entropy_part, smoothed": ("of_all * whole", "2.0 * of_all * whole"),
    "cross_entropy_part, all of it": ("tl.exp(most - tl.load", "tl.exp(tl.load"),
    "cross_entropy, smoothed": ("if SUMS:", "if not SUMS:"),
    "cross_entropy, more columns than a block": ("total * tl.exp(most - above) +", "total +"),
    "rotary": ("y1 = x1 * c1 + x2 * s2", "y1 = x1 * c1 - x2 * s2"),
    "rotary_pair, fewer keys": ("(dq, dk), cos, sin, is_back=True", "(dq, dk), cos, sin, is_back=False"),
}


@pytest.mark.parametrize("name", by_day(WRONG, *(name for name in WRONG if "wide" not in name)))
def test_a_wrong_kernel_is_caught(name, interpret, tmp_path):
    case, (right, wrong) = CASES[name], WRONG[name]
    written = [pathlib.Path(module.__file__).read_text() for module in (case.module, rows)]
    assert any(right in text for text in written)
    of_family, of_rows = (text.replace(right, wrong) for text in written)
    name = f"wrong_{abs(hash(name))}"
    _loaded(tmp_path, f"{name}_rows", of_rows)
    of_family = of_family.replace('"autopar::', f'"{name}::').replace("autopar.kernels.rows", f"{name}_rows")
    module = _loaded(tmp_path, name, of_family)
    assert is_near(case, torch.float32)
    assert not is_near(replace(case, module=module), torch.float32)


def _loaded(folder, name, source):
    """A module of this source."""
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

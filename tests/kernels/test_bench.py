"""`python -m autopar.bench kernels`, and what `kernels=True` takes of what it keeps."""

from __future__ import annotations

import sys
import types
from dataclasses import replace

import torch

import autopar
from autopar.bench.__main__ import main
from autopar.bench.kernels import line
from autopar.kernels import NAMES, gated, measured, timing
from autopar.kernels.measured import faster, keep
from autopar.kernels.timing import FamilyTimes, Times, measure
from tests.language import drawn, llama


def test_every_family_is_timed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", "kernels", "--device", "cpu", "--small", "--only", "gated", "rotary"])
    assert main() == 0
    printed = capsys.readouterr().out
    assert printed.count("| gated |") == 2 and printed.count("| rotary |") == 2
    (row, _) = measure(["gelu_tanh"], "cpu", small=True)
    assert row.floor_bytes == (2 * 4 * 64 * 2, 3 * 4 * 64 * 2) and row.kernel.both > 0  # x, y; dy, x, dx: halves


def test_without_a_device_nothing_is_kept(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench", "kernels"])
    assert main() == 1 and "not run" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [] and faster() == ()


def test_kernels_that_were_faster_are_taken(monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(measured, "can_run", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    keep("a card", {"gated": 1.4, "rms_norm": 0.9})
    keep("another card", dict.fromkeys(NAMES, 2.0))
    keep("a card", {**dict.fromkeys(NAMES, 0.5), "gated": 1.4, "rotary": 1.1, "rotary compiled": 1.2})
    assert faster() == ("gated", "rotary") and faster(compiled=True) == ("rotary",)
    asked = {"mesh": (1,), "memory_budget": "inf"}
    plan = autopar.plan(llama(), drawn(4, 64, 256), cluster="h100-1x8", **asked)
    assert plan.kernels == ("gated", "rotary") and dict(plan.defaults)["kernels"] == "gated, rotary"
    compiled = autopar.plan(llama(), drawn(4, 64, 256), cluster="h100-1x8", compile=True, **asked)
    assert compiled.kernels == ("rotary",) and dict(compiled.defaults)["kernels"] == "rotary"
    assert autopar.plan(llama(), drawn(4, 64, 256), cluster="h100-1x8", kernels=False, **asked).kernels == ()
    monkeypatch.setattr(measured, "_measured_now", lambda device, names: {})
    for other in ("not JSON", "[]", '{"a card": 1}', '{"a card": {"gated": "much"}}'):
        (tmp_path / "kernels.json").write_text(other)
        assert faster() == ()


def test_a_new_device_is_measured_once(monkeypatch, tmp_path, capsys):
    asked = []

    def rows(names, device, quick):
        asked.append((names, device, quick))
        for name in names:
            if name == "dropout":
                raise RuntimeError("no such instruction")
            for seconds in (1.0, 2.0):  # in two dtypes: the larger decides
                kernel, ops = Times(seconds / 2, seconds / 2), Times(1.0, 0.5)
                yield FamilyTimes(
                    name, "", (), kernel, ops, Times(), Times(), (0, 0), (0.0, 0.0), 1.0, 0, is_right=name != "rotary"
                )

    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(measured, "can_run", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a new card")
    monkeypatch.setattr(timing, "measure", rows)
    keep("a new card", {"gated": 1.2, "rotary": 3.0})
    try:
        assert faster() == ("gated", "rotary")
        assert asked == [((n,), "cuda", True) for n in NAMES if n not in ("gated", "rotary")]
        said = capsys.readouterr().err
        assert "measuring its kernels on a new card" in said
        assert "the kernels of dropout do not run on a new card: RuntimeError('no such instruction')" in said
        assert faster() == ("gated", "rotary")
        assert asked[len(NAMES) - 2 :] == [(("dropout",), "cuda", True)]  # the file has all others now
        measured.path().unlink()
        asked.clear()
        assert faster() == () and len(asked) == len(NAMES)  # 0.75 of the ops' speed, and rotary is wrong
    finally:
        measured._measured_now.cache_clear()


def test_a_kernel_is_held_against_what_runs_without_it():
    """One that torch.compile beats is taken where nothing is compiled, and of several shapes the least counts."""
    kernel, never = Times(0.5, 0.5), Times()

    def row(ops, compiled, liger):
        return FamilyTimes("gated", "", (), kernel, ops, compiled, liger, (1, 1), (1.0, 1.0), 1.0, 0, True)

    rows = row(Times(1, 1), Times(0.4, 0.5), Times(0.1, 0.1)), row(Times(2, 2), never, never)
    assert timing.least_gains(rows) == {"gated": 2.0, "gated compiled": 0.9}
    assert timing.least_gains(rows[1:]) == {"gated": 4.0}


def test_a_kernel_that_is_wrong_gains_nothing(monkeypatch, as_ops):
    monkeypatch.setattr(timing, "families", lambda names: [replace(gated.FAMILY, call=lambda g, u, kind: g + u)])
    (row, _) = measure(["gated"], "cpu", small=True)
    assert not row.is_right and row.gain == 0.0


def test_liger_is_timed_beside_where_it_is_installed(monkeypatch):
    """A module stands for it: what is slower gains nothing, and what cannot be called does not count."""
    liger = types.SimpleNamespace(
        liger_swiglu=lambda gate, up: torch.nn.functional.silu(gate) * up, liger_layer_norm=lambda x, w: x
    )
    assert timing._of_liger("gated") is None
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.functional", liger)
    gate, up = torch.randn(3, 4), torch.randn(3, 4)
    assert torch.equal(timing._of_liger("gated")(gate, up, 0), gated.reference(gate, up, 0))
    assert timing._of_liger("gelu_tanh") is None
    gate.requires_grad_()
    times = timing._times_of(timing._of_liger("gated"), [gate, up], [0], [torch.ones(3, 4)], "cpu")
    assert 0 < times.forward < 1 and 0 < times.backward < 1
    wrong = timing._times_of(timing._of_liger("layer_norm"), [gate, up, up], [1e-5], [], "cpu")
    assert wrong.both == float("inf")
    row = FamilyTimes(
        "gated", "", (), Times(1.0, 1.0), Times(1.0, 2.0), Times(), Times(0.25, 0.75), (2, 1), (0.5, 0.3), 4.0, 0, True
    )
    assert row.gain == 0.5 and row.shares == (0.5, 0.25) and row.of_copies == (0.5, 0.3)
    assert " | 250000.0 + 750000.0 | " in line(row) and " | - | " in line(row)

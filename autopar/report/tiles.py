"""The figures of a plan at one look, and the memory of a device over a step: a page and a notebook show both."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from autopar.solver.figures import between, count, several, size, time
from autopar.solver.plan import Beside, Plan
from autopar.solver.record import fullest
from autopar.solver.staged import mesh_of
from autopar.solver.summary import batch_of, cluster_of, compute_of

# Kinds of memory in colours that stand on white and on black; what is alike has one hue.
COLORS = {
    "parameters": "#4a76b8",
    "gathered parameters": "#93b5e1",
    "gradients": "#d98a4b",
    "gradients of activations": "#ecc09a",
    "optimizer states": "#5a9e78",
    "saved activations": "#9684bd",
    "transients": "#cbbfe2",
    "inputs and buffers": "#7bb0b4",
    "step temporaries": "#c9ab52",
}
_OTHER = "#aab2bf"  # the colour of a kind that a file of another release has
_PRESET = "fsdp"  # the preset that most jobs run


class Tile(NamedTuple):
    """A figure with its name and a note; `share` is what part of its limit it takes, where it has one."""

    name: str
    value: str
    note: str
    share: float | None = None


def tiles_of(plan: Plan) -> list[Tile]:
    """The figures of a plan that a reader asks for first; what is not known has no tile."""
    return [*_speed(plan), _memory(plan), *_host(plan), _gap(plan), *_beside(plan)]


def subtitle_of(plan: Plan) -> str:
    """The batch, the dtype of compute, the optimizer, the cluster and the mesh."""
    batch = [batch_of(plan)] if plan.workload.rows else []
    return ", ".join([*batch, *compute_of(plan), cluster_of(plan), mesh_of(plan)])


def _speed(plan: Plan) -> Iterator[Tile]:
    rates = plan.rates
    work = plan.workload
    is_sourced = bool(sum(plan.sources.values()))
    note = f"nine of ten: {between(*plan.step_interval_s)}" if is_sourced else "the sum of formulas"
    yield Tile("expected step", time(plan.expected_s), note)
    if not work.rows or not rates.step_s:
        return
    each = f"{rates.per_s_device:,.{0 if rates.per_s_device >= 100 else 1}f}"
    yield Tile(f"{rates.unit}/s a device", each, f"{count(rates.per_s)} {rates.unit}/s in all")
    if work.flops and work.peak_flops_per_s:
        yield Tile("MFU", f"{rates.mfu:.1%}", f"of {_flops(work.peak_flops_per_s)} in {work.dtype}")


def _flops(per_s: float) -> str:
    """A rate in the data sheet's unit."""
    return f"{per_s / 1e12:,.4g} TFLOP/s"


def _memory(plan: Plan) -> Tile:
    device = plan.workload.memory_bytes
    peak = size(plan.peak_bytes)
    if math.isfinite(plan.budget):
        of_device = f", a device has {size(device)}" if device else ""
        share = plan.peak_bytes / plan.budget if plan.budget else None
        return Tile("memory at the peak", peak, f"of a budget of {size(plan.budget)}{of_device}", share)
    share = plan.peak_bytes / device if device else None
    return Tile("memory at the peak", peak, f"of a device's {size(device)}" if device else "no budget", share)


def _host(plan: Plan) -> Iterator[Tile]:
    """A tile for what lies on the host, if anything does."""
    if plan.offloaded or plan.hosted:
        room = plan.host_budget
        of = f", of a budget of {size(room)}" if room else ""
        share = plan.host_bytes / room if room else None
        what = [several(len(plan.offloaded), "value")] if plan.offloaded else []
        what += [f"states of {several(len(plan.hosted), 'parameter')}"] if plan.hosted else []
        what += [f"{len(plan.wholly_hosted)} of these whole"] if plan.wholly_hosted else []
        yield Tile("waits on the host", size(plan.host_bytes), f"{' and '.join(what)}{of}", share)


def _gap(plan: Plan) -> Tile:
    note = f"formulas: {time(plan.step_time_s)}, and no plan below {time(plan.lower_bound_s)}"
    return Tile("gap to the best", f"{plan.gap:.2%}", note)


def _beside(plan: Plan) -> Iterator[Tile]:
    """A tile for the plan of FSDP on the same mesh, if it was asked for."""
    for rival in plan.known_beside or ():
        if rival.name == _PRESET:
            where = "on this mesh" if plan.pipeline is None else "without stages"
            yield Tile(f"FSDP {where}", *_of_rival(plan, rival))


def _of_rival(plan: Plan, rival: Beside) -> tuple[str, str]:
    if rival.why:
        return "no plan", rival.why
    if not rival.fits:
        return "does not fit", f"needs {size(rival.peak_bytes)} where nothing is recomputed"
    ratio = rival.step_time_s / plan.step_time_s if plan.step_time_s else 1.0
    return f"{ratio:.2f} x", f"as long: {time(rival.step_time_s)} by formulas, {size(rival.peak_bytes)}"


def memory_of(plan: Plan, most: int) -> dict[str, Any]:
    """Times of a step, the bytes held at each by kind, and colours: at most so many times.

    Each is the fullest of equal spans. The first kind lies at the bottom of a picture. Without the space, and of a
    file without them, there are no times.
    """
    is_known = plan.has_space or plan.record.times or plan.pipeline is not None
    times, held = plan.line() if is_known else ([], {})
    kept = fullest(list(zip(*held.values(), strict=True)), most)
    return {
        "times": [times[t] for t in kept],
        "held": {kind: list(map(nbytes.__getitem__, kept)) for kind, nbytes in held.items()},
        "colors": {kind: COLORS.get(kind, _OTHER) for kind in {**held, **plan.memory}},
    }

"""`universe`: every strategy that an op seems to allow on one axis, found by running it, without any rule.

For every assignment of R, S(d) and P(sum) to the operands the op runs on the parts that devices would hold, and the
results say how the outputs lie; then cotangents lie in every way that their outputs allow, and the local gradients say
how those of the operands lie. What holds in several draws, on two and on three devices, is a strategy.

    universe(cumsum along dim 1)   ->   R -> R,  R/P(sum) -> R/P(sum),  S(0) -> S(0),  P(sum) -> P(sum),  ...

No number of draws is a proof: an op may look for one value that none of them has. So it decides no plan. It refutes
rules (every strategy that a rule gives must be found), finds what rules miss, and suggests a line of `autopar.rule` for
an op that has none, which its owner may confirm. Its draws are its own: torch's generator does not move.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from autopar.graph.graph import TensorType
from autopar.graph.nodes import WrittenCall
from autopar.sharding.placement import Flow, P, Placement, R
from autopar.sharding.strategies import Strategy
from autopar.space.limits import LIMITS
from autopar.space.small_calls import DRAWS, Draw, drawn, filled, shrunk, small_sizes
from autopar.space.trial import DEVICES, CannotRun, Devices, Placements, Run, Trial, lies, placements_of, tupled


def universe(trial: Trial, devices: Sequence[int] = DEVICES) -> set[Strategy]:
    """Every strategy under which the call ran right on each of these numbers of devices."""
    found = [set(_strategies(Devices(trial, n))) for n in devices]
    return set.intersection(*found) if found else set()


def _strategies(devices: Devices) -> Iterator[Strategy]:
    """Every strategy under which the parts' results and gradients make up those of the whole."""
    for placements in itertools.product(*(placements_of(t, devices.n) for t in devices.whole)):
        for outs in itertools.product(*(placements_of(e, devices.n) for e in devices.expected)):
            try:
                run = devices.forward(placements, outs)
            except CannotRun:
                continue
            ends = zip(devices.expected, outs, strict=True)
            if not all(lies(_parts(run, j), o, e.detach()) for j, (e, o) in enumerate(ends)):
                continue
            if not devices.flows_back:
                yield Strategy(_by_convention(placements), _by_convention(outs))
                continue
            for pulled in itertools.product(*map(_cotangent_placements, outs, devices.expected)):
                yield from _backward(devices, run, pulled)


def _parts(run: Run, j: int) -> list[Tensor]:
    """Result `j` of a run on each device, without its autograd history."""
    return [results[j].detach() for results in run.results]


def _cotangent_placements(out: Placement, expected: Tensor) -> Placements:
    """The placements that the gradient of an output may have."""
    if out.is_shard:
        return (out,)
    return (R, P()) if expected.requires_grad else (_conventional(out),)


def _backward(devices: Devices, run: Run, pulled: Placements) -> Iterator[Strategy]:
    """The strategies whose local gradients make up the whole ones, with cotangents placed as `pulled`."""
    found = devices.backward(run, pulled)
    if found is None:
        return
    options = []
    for k, position in enumerate(devices.trained):
        placement = run.operands[position]
        local = [f[k] for f in found]
        ways = [placement] if placement.is_shard else [R, P()]
        options.append([p for p in ways if lies(local, p, devices.gradients[k])])
    for chosen in itertools.product(*options):
        operands = list(_by_convention(run.operands))
        for position, gradient in zip(devices.trained, chosen, strict=True):
            operands[position] = Flow(run.operands[position], gradient)
        yield Strategy(tuple(operands), tuple(Flow(o, c) for o, c in zip(run.outputs, pulled, strict=True)))


def _by_convention(placements: Placements) -> tuple[Flow, ...]:
    return tuple(Flow(p, _conventional(p)) for p in placements)


def _conventional(placement: Placement) -> Placement:
    """The placement that stands for the gradient of a tensor without one."""
    return R if placement.is_partial else placement


# -- ops of a graph


def suspected(op: Any, arguments: dict[str, Any], operands: Sequence[TensorType], outputs: Sequence[TensorType]) -> str:
    """A line of notation under which an op without a rule ran right in all draws it takes; else "".

    `arguments` have types in the places of tensors. The op runs on small tensors, in which every larger size of the
    call is another odd multiple of six; numbers among its arguments that are such sizes follow.
    """
    return _suspected(WrittenCall(op, arguments, repr(arguments), tuple(operands), tuple(outputs)))


@functools.lru_cache(maxsize=256)
def _suspected(call: WrittenCall) -> str:
    assignments = math.prod(len(t.shape) + 2 for t in call.types)
    if (
        assignments > LIMITS.assignments
        or any("complex" in t.dtype for t in call.types)
        or _says_places(call.arguments)
    ):
        return ""
    found = [strategies for draw in DRAWS if (strategies := _drawn(call, draw)) is not None]
    return _line(set.intersection(*found), call) if found else ""


def _line(found: set[Strategy], call: WrittenCall) -> str:
    """The cuts of these strategies as one line of notation.

    Partial sums are not suggested, since trials do not show linearity.
    """
    letters: dict[tuple[int, int], str] = {}
    inside = len(call.operands)
    for strategy in sorted(found, key=repr):
        ends = [*strategy.operands, *strategy.outputs]
        cut = [(i, f.value.dim) for i, f in enumerate(ends) if f.value.is_shard]
        cuts_an_operand = any(i < inside for i, _ in cut)
        has_sums = any(f.value.is_partial for f in strategy.operands)
        if cuts_an_operand and not has_sums and not any(place in letters for place in cut):
            letters |= dict.fromkeys(cut, "abcdefghijklmnopqrstuvwxyz"[len(set(letters.values())) % 26])
    if not letters:
        return ""
    rows = []
    for i, type_ in enumerate(call.types):
        rows.append(" ".join(letters.get((i, d), f"w{i}_{d}!") for d in range(len(type_.shape))))
    return f"{', '.join(rows[:inside])} -> {', '.join(rows[inside:])}"


def _says_places(value: Any) -> bool:
    """Whether an argument contains a slice of a dim."""
    if isinstance(value, slice):
        return value != slice(None)
    if isinstance(value, dict):
        return any(map(_says_places, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_says_places, value))


def _drawn(call: WrittenCall, draw: Draw) -> set[Strategy] | None:
    """The strategies under which a call ran right on small random tensors; None where it does not run."""
    small = small_sizes([n for t in call.operands for n in t.shape])
    little = shrunk(call, small)

    def run(tensors: Sequence[Tensor]) -> Any:
        return call.op.run(filled(little.arguments, tensors))

    trial = Trial(drawn(little, draw), run)
    try:
        if not _is_of(tupled(trial.run(trial.operands)), call.outputs, small):
            return set()
        return universe(trial)
    except Exception:  # an op may reject random numbers in any way
        return None


def _is_of(results: Sequence[Tensor], types: Sequence[TensorType], small: dict[int, int]) -> bool:
    """Whether results have the ranks, gradients and (reduced) sizes of a call's outputs."""
    if [(r.dim(), r.requires_grad) for r in results] != [(len(t.shape), t.requires_grad) for t in types]:
        return False
    for result, type_ in zip(results, types, strict=True):
        for size, whole in zip(result.shape, type_.shape, strict=True):
            other = max(size, 1) if whole > 6 else whole  # a size of the output's own
            if size != small.get(whole, other):
                return False
    return True

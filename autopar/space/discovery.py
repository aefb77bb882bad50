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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar.graph.graph import TensorType
from autopar.graph.nodes import WrittenCall
from autopar.runtime.private import function_of
from autopar.sharding.placement import Flow, P, Placement, R, S, part
from autopar.sharding.strategies import Strategy

DEVICES = (2, 3)
MOST = 400  # assignments of placements that are tried for an op of a graph
_TOLERANCE = {"float64": 1e-9, "float32": 1e-4}
_REFUSALS = (RuntimeError, ValueError, IndexError, TypeError, AssertionError)  # of ops, on operands they cannot take

Shape = tuple[int, ...]
Placements = tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Trial:
    """One op call: its tensor operands, the function it computes, and that function on parts of given output shapes."""

    operands: tuple[Tensor, ...]
    run: Callable[[Sequence[Tensor]], Any]
    # where arguments name the output's shape
    local: Callable[[Sequence[Tensor], Sequence[Shape]], Any] | None = None

    def run_on_part(self, operands: Sequence[Tensor], shapes: Sequence[Shape]) -> tuple[Tensor, ...]:
        """The outputs of the call on parts of its operands, where a device's outputs have these shapes."""
        return _tuple(self.run(operands) if self.local is None else self.local(operands, shapes))


def universe(trial: Trial, devices: Sequence[int] = DEVICES) -> set[Strategy]:
    """Every strategy under which the call ran right on each of these numbers of devices."""
    found = [set(_Devices(trial, n).strategies()) for n in devices]
    return set.intersection(*found) if found else set()


class _Run(NamedTuple):
    """A forward on parts whose results were the parts of the outputs."""

    operands: Placements
    outputs: Placements
    local: list[list[Tensor]]  # by device
    results: list[tuple[Tensor, ...]]


class _Devices:
    """Some devices that run a call on parts of its operands, and what the call computes on the whole ones."""

    def __init__(self, trial: Trial, n: int) -> None:
        self.trial = trial
        self.n = n
        self.random = torch.Generator().manual_seed(n)
        self.whole = [t.detach().requires_grad_(t.requires_grad) for t in trial.operands]
        with torch.enable_grad():
            self.expected = _tuple(trial.run(self.whole))
        self.trained = [i for i, t in enumerate(self.whole) if t.requires_grad]
        self.flows_back = bool(self.trained) and any(e.requires_grad for e in self.expected)
        self.cotangents = [self._cotangent(e) for e in self.expected]
        self.gradients: Sequence[Tensor] = []
        if self.flows_back:
            self.gradients = _gradients(self.expected, [self.whole[i] for i in self.trained], self.cotangents)

    def _cotangent(self, output: Tensor) -> Tensor:
        return _normal(output, self.random) if output.is_floating_point() else torch.zeros_like(output)

    def strategies(self) -> Iterator[Strategy]:
        """Every strategy under which the parts' results and gradients make up those of the whole."""
        for placements in itertools.product(*(_placements(t, self.n) for t in self.whole)):
            held = [self._spread(t.detach(), p) for t, p in zip(self.whole, placements, strict=True)]
            for outs in itertools.product(*(_placements(e, self.n) for e in self.expected)):
                run = self._forward(placements, outs, held)
                if run is None:
                    continue
                if not self.flows_back:
                    yield Strategy(_by_convention(placements), _by_convention(outs))
                    continue
                for pulled in itertools.product(*map(self._cotangent_placements, outs, self.expected)):
                    yield from self._backward(run, pulled)

    def _spread(self, tensor: Tensor, placement: Placement) -> list[Tensor]:
        return spread(tensor, placement, self.n, self.random)

    def _shapes(self, outs: Placements, device: int) -> list[Shape]:
        """The local shapes of the outputs on a device."""
        return [_part_shape(tuple(e.shape), o, self.n, device) for e, o in zip(self.expected, outs, strict=True)]

    def _forward(self, placements: Placements, outs: Placements, held: list[list[Tensor]]) -> _Run | None:
        """Run on the parts; None unless the results are the parts of the outputs under placements `outs`."""
        if not _fits(self.trial, held, self._shapes(outs, 0)):
            return None
        local = [self._parts(held, i) for i in range(self.n)]
        try:
            with torch.enable_grad():
                results = [self.trial.run_on_part(mine, self._shapes(outs, i)) for i, mine in enumerate(local)]
        except _REFUSALS:
            return None
        for j, (expected, out) in enumerate(zip(self.expected, outs, strict=True)):
            if not lies([r[j].detach() for r in results], out, expected.detach()):
                return None
        return _Run(placements, outs, local, results)

    def _parts(self, held: list[list[Tensor]], device: int) -> list[Tensor]:
        """A device's parts of the operands, as leaf tensors."""
        return [h[device].clone().requires_grad_(k in self.trained) for k, h in enumerate(held)]

    def _cotangent_placements(self, out: Placement, expected: Tensor) -> Placements:
        """The placements that the gradient of an output may have."""
        if out.is_shard:
            return (out,)
        return (R, P()) if expected.requires_grad else (_conventional(out),)

    def _backward(self, run: _Run, pulled: Placements) -> Iterator[Strategy]:
        """The strategies whose local gradients make up the whole ones, with cotangents placed as `pulled`."""
        parts = [self._spread(c, p) for c, p in zip(self.cotangents, pulled, strict=True)]
        found = []
        for i in range(self.n):
            results = run.results[i]
            wanted = [j for j, e in enumerate(self.expected) if e.requires_grad and results[j].requires_grad]
            if not wanted:
                return
            trained = [run.local[i][k] for k in self.trained]
            found.append(_gradients([results[j] for j in wanted], trained, [parts[j][i] for j in wanted]))
        options = []
        for k, position in enumerate(self.trained):
            placement, local = run.operands[position], [f[k] for f in found]
            ways = [placement] if placement.is_shard else [R, P()]
            options.append([p for p in ways if lies(local, p, self.gradients[k])])
        for chosen in itertools.product(*options):
            operands = list(_by_convention(run.operands))
            for position, gradient in zip(self.trained, chosen, strict=True):
                operands[position] = Flow(run.operands[position], gradient)
            yield Strategy(tuple(operands), tuple(Flow(o, c) for o, c in zip(run.outputs, pulled, strict=True)))


def _fits(trial: Trial, held: list[list[Tensor]], shapes: Sequence[Shape]) -> bool:
    """Whether an op takes parts of these shapes and gives parts of those, asked on meta tensors.

    The kernels themselves do not all check their arguments.
    """
    meta = [h[0].to("meta") for h in held]
    try:
        with torch.no_grad():
            results = trial.run_on_part(meta, shapes)
    except NotImplementedError:
        return True  # it does not run on meta tensors: its kernel has to check
    except _REFUSALS:
        return False
    return [tuple(r.shape) for r in results] == [tuple(s) for s in shapes]


def _by_convention(placements: Placements) -> tuple[Flow, ...]:
    return tuple(Flow(p, _conventional(p)) for p in placements)


def _conventional(placement: Placement) -> Placement:
    """The placement that stands for the gradient of a tensor without one."""
    return R if placement.is_partial else placement


def _gradients(outputs: Sequence[Tensor], operands: Sequence[Tensor], cotangents: Sequence[Tensor]) -> Sequence[Tensor]:
    kept = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    return torch.autograd.grad(
        [o for o, _ in kept], operands, [c for _, c in kept], retain_graph=True, materialize_grads=True
    )


def _placements(tensor: Tensor, n: int) -> list[Placement]:
    sums: list[Placement] = [P()] if tensor.is_floating_point() else []
    return [R, *(S(d) for d, size in enumerate(tensor.shape) if size >= n and part(size, n, n - 1)[1] > 0), *sums]


def _normal(like: Tensor, random: torch.Generator) -> Tensor:
    return torch.randn(like.shape, dtype=torch.float64, device="cpu", generator=random).to(like.dtype)


def spread(tensor: Tensor, placement: Placement, n: int, random: torch.Generator) -> list[Tensor]:
    """A tensor's part on each of n devices; partial sums are drawn at random."""
    if placement.is_shard:
        return [tensor.narrow(placement.dim, *part(tensor.shape[placement.dim], n, i)).contiguous() for i in range(n)]
    if placement.is_partial:
        parts = [_normal(tensor, random) for _ in range(n - 1)]
        return [*parts, tensor - sum(parts)]
    return [tensor] * n


def lies(parts: Sequence[Tensor], placement: Placement, whole: Tensor) -> bool:
    """Whether these are the parts of `whole` under a placement, up to rounding."""
    shapes = [_part_shape(tuple(whole.shape), placement, len(parts), i) for i in range(len(parts))]
    if [tuple(p.shape) for p in parts] != shapes or any(p.dtype != whole.dtype for p in parts):
        return False
    held = parts
    if placement.is_shard:
        held = [torch.cat(list(parts), placement.dim)]
    elif placement.is_partial:
        held = [functools.reduce(torch.add, parts)]
    atol = _TOLERANCE.get(str(whole.dtype).removeprefix("torch."), 0.0) * _scale(whole)
    return all(torch.allclose(p, whole, rtol=0.0, atol=atol, equal_nan=True) for p in held)


def _scale(whole: Tensor) -> float:
    """The largest absolute value of a finite tensor, at least 1; 1 for any other."""
    if whole.numel() and whole.is_floating_point() and bool(torch.isfinite(whole).all()):
        return max(1.0, float(whole.abs().max()))
    return 1.0


def _part_shape(shape: Shape, placement: Placement, n: int, i: int) -> Shape:
    if not placement.is_shard:
        return tuple(shape)
    return (*shape[: placement.dim], part(shape[placement.dim], n, i)[1], *shape[placement.dim + 1 :])


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
    if assignments > MOST or any("complex" in t.dtype for t in call.types) or _says_places(call.arguments):
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


def _small(sizes: Sequence[int]) -> dict[int, int]:
    """A small size for each size: up to six it stays, larger ones become distinct odd multiples of six."""
    larger = sorted({n for n in sizes if n > 6})
    return {n: 6 * (2 * i + 1) for i, n in enumerate(larger)} | {n: n for n in sizes if n <= 6}


@dataclass(frozen=True, slots=True)
class Draw:
    """A way to draw numbers: floats from a normal distribution or a list, integers from a list."""

    scale: float = 0.0
    floats: tuple[float, ...] = ()
    whole: tuple[int, ...] = (0, 1)

    def tensor(self, type_: TensorType, shape: Sequence[int], own: Sequence[float], random: torch.Generator) -> Tensor:
        """A random tensor of this type and shape; constants of the op itself (`own`) join the numbers to draw."""
        if "float" in type_.dtype and self.scale:
            numbers = torch.randn(shape, dtype=torch.float64, device="cpu", generator=random) * self.scale
            return numbers.requires_grad_(type_.requires_grad)
        pool = [*self.floats, *own]
        if "float" not in type_.dtype:
            pool = [*self.whole, *(n for n in own if isinstance(n, int))]
        numbers = torch.tensor(pool, dtype=torch.float64, device="cpu")
        picked = numbers[torch.randint(0, len(pool), shape, device="cpu", generator=random)]
        if "float" in type_.dtype:
            return picked.requires_grad_(type_.requires_grad)
        if type_.dtype != "bool":
            bounds = torch.iinfo(type_.torch_dtype)
            picked = picked.clamp(bounds.min, bounds.max)
        return picked.to(type_.torch_dtype)


DRAWS = (
    Draw(scale=1.0),
    Draw(scale=1e-3, whole=(0, 1, 2, 3, 4, 5)),
    Draw(scale=1e4, whole=(-100, -1, 0, 1, 2, 5)),
    Draw(floats=(0.0, 1.0, -1.0, 0.0, 2.0, 1.0, -100.0, 0.5), whole=(-(2**31), -100, -1, 0, 0, 1, 1, 7, 2**31 - 1)),
    Draw(floats=(0.0, 1.0, -1.0, 1e30, math.inf, -math.inf, math.nan), whole=(0, 0, 0, 1)),
)


def constants_of(op: Any) -> tuple[float, ...]:
    """The numbers in the code of an op written in Python, such as a bound or a token that it looks for."""
    call = op.call
    behind = function_of(call._schema.name) if hasattr(call, "_schema") else call
    code = getattr(behind, "__code__", None)
    numbers = [c for c in (code.co_consts if code else ()) if isinstance(c, (int, float)) and not isinstance(c, bool)]
    return tuple(dict.fromkeys(numbers))


def _drawn(call: WrittenCall, draw: Draw) -> set[Strategy] | None:
    """The strategies under which a call ran right on small random tensors; None where it does not run."""
    random = torch.Generator().manual_seed(0)
    op, arguments = call.op, call.arguments
    if op.signature is not None:  # tensors are handed out in the order of the signature, as operands are
        arguments = {n: arguments[n] for n in op.signature.parameters if n in arguments}
    small, own = _small([n for t in call.operands for n in t.shape]), constants_of(op)
    operands = tuple(draw.tensor(t, [*map(small.__getitem__, t.shape)], own, random) for t in call.operands)

    def run(tensors: Sequence[Tensor]) -> Any:
        waiting = iter(tensors)
        return op.run({k: _filled(v, waiting, small) for k, v in arguments.items()})

    trial = Trial(operands, run)
    try:
        if not _is_of(_tuple(trial.run(operands)), call.outputs, small):
            return set()
        return universe(trial)
    except Exception:  # it does not run on these numbers
        return None


def _filled(value: Any, tensors: Iterator[Tensor], small: dict[int, int]) -> Any:
    """An argument with tensors in the places of types, and with small sizes for larger ones."""
    if isinstance(value, TensorType):
        return next(tensors)
    if isinstance(value, (tuple, list)):
        return type(value)(_filled(v, tensors, small) for v in value)
    is_large = isinstance(value, int) and not isinstance(value, bool) and value > 6
    return small.get(value, value) if is_large else value


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


def _tuple(result: Any) -> tuple[Tensor, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)

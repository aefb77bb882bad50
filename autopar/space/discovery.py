"""What an op seems to allow on one axis, found by running it: no rule is asked.

For every assignment of R, S(d) and P(sum) to the operands the op runs on the parts that devices would hold, and the
results say how the outputs lie; then cotangents lie in every way that their outputs allow, and the local gradients say
how those of the operands lie. What holds in several draws, on two and on three devices, is a strategy.

    universe(cumsum along dim 1)   ->   R -> R,  R/P(sum) -> R/P(sum),  S(0) -> S(0),  P(sum) -> P(sum),  ...

No number of draws is a proof: an op may look for one value that none of them has. So it decides no plan. It refutes
rules (every strategy that a rule gives must be found), finds what rules miss, and suggests a line of `autopar.rule` for
an op that has none, which its owner may confirm. Its draws are its own: torch's generator does not move.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autopar.sharding.placement import Flow, P, Placement, R, S, part
from autopar.sharding.strategies import Strategy

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DEVICES = (2, 3)
MOST = 400  # assignments that are tried for an op of a graph
_TOLERANCE = {"float64": 1e-9, "float32": 1e-4}


@dataclass(frozen=True, slots=True)
class Call:
    """One op call: its tensor operands, what it computes, and what it computes on parts of a given local shape."""

    operands: tuple[Tensor, ...]
    run: Callable[[Sequence[Tensor]], Any]
    local: Callable[[Sequence[Tensor], Sequence[tuple[int, ...]]], Any] | None = (
        None  # where arguments name the output's shape
    )


def universe(call: Call, devices: Sequence[int] = DEVICES) -> set[Strategy]:
    """Every strategy that is right for this call on each of these numbers of devices."""
    found: set[Strategy] | None = None
    for n in devices:
        here = set(_on(call, n))
        found = here if found is None else found & here
    return found or set()


def _on(call: Call, n: int) -> Iterator[Strategy]:
    import torch

    random = torch.Generator().manual_seed(n)
    whole = [t.detach().requires_grad_(t.requires_grad) for t in call.operands]
    with torch.enable_grad():
        expected = _tuple(call.run(whole))
    trained = [i for i, t in enumerate(whole) if t.requires_grad]
    flows_back = bool(trained) and any(e.requires_grad for e in expected)
    cotangents = [_normal(e, random) if e.is_floating_point() else torch.zeros_like(e) for e in expected]
    gradients = _gradients(expected, [whole[i] for i in trained], cotangents) if flows_back else []
    for placements in itertools.product(*(_placements(t, n) for t in whole)):
        held = [spread(t.detach(), p, n, random) for t, p in zip(whole, placements, strict=True)]
        for outs in itertools.product(*(_placements(e, n) for e in expected)):
            if not _fits(call, held, [_part_shape(e.shape, o, n, 0) for e, o in zip(expected, outs, strict=True)]):
                continue
            local = [[h[i].clone().requires_grad_(k in trained) for k, h in enumerate(held)] for i in range(n)]
            try:
                with torch.enable_grad():
                    results = [
                        _tuple(
                            call.run(mine)
                            if call.local is None
                            else call.local(
                                mine, [_part_shape(e.shape, o, n, i) for e, o in zip(expected, outs, strict=True)]
                            )
                        )
                        for i, mine in enumerate(local)
                    ]
            except (RuntimeError, ValueError, IndexError, TypeError, AssertionError):
                continue  # the op does not run on such parts
            if not all(
                lies([r[j].detach() for r in results], o, e.detach())
                for j, (e, o) in enumerate(zip(expected, outs, strict=True))
            ):
                continue
            if not flows_back:
                yield Strategy(
                    tuple(Flow(p, _conventional(p)) for p in placements), tuple(Flow(o, _conventional(o)) for o in outs)
                )
                continue
            for pulled in itertools.product(
                *(
                    (o,) if o.is_shard else (R, P()) if e.requires_grad else (_conventional(o),)
                    for o, e in zip(outs, expected, strict=True)
                )
            ):
                yield from _backward(
                    n, placements, outs, pulled, local, results, cotangents, expected, gradients, trained, random
                )


def _fits(call: Call, held: list[list[Tensor]], shapes: Sequence[tuple[int, ...]]) -> bool:
    """Do parts of these shapes go together, and give parts of those? Asked on meta tensors first.

    Not every kernel checks what it is given.
    """
    import torch

    meta = [h[0].to("meta") for h in held]
    try:
        with torch.no_grad():
            results = _tuple(call.run(meta) if call.local is None else call.local(meta, shapes))
    except NotImplementedError:
        return True  # it has no shapes of its own: its kernel must know
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError):
        return False
    return [tuple(r.shape) for r in results] == [tuple(s) for s in shapes]


def _backward(
    n: int,
    placements: Sequence[Placement],
    outs: Sequence[Placement],
    pulled: Sequence[Placement],
    local: list[list[Tensor]],
    results: list[tuple[Tensor, ...]],
    cotangents: Sequence[Tensor],
    expected: Sequence[Tensor],
    gradients: Sequence[Tensor],
    trained: Sequence[int],
    random: torch.Generator,
) -> Iterator[Strategy]:
    parts = [spread(c, p, n, random) for c, p in zip(cotangents, pulled, strict=True)]
    found = []
    for i in range(n):
        wanted = [j for j, e in enumerate(expected) if e.requires_grad and results[i][j].requires_grad]
        if not wanted:
            return
        found.append(
            _gradients([results[i][j] for j in wanted], [local[i][k] for k in trained], [parts[j][i] for j in wanted])
        )
    options = []
    for k, position in enumerate(trained):
        shards = [placements[position]] if placements[position].is_shard else [R, P()]
        options.append([p for p in shards if lies([f[k] for f in found], p, gradients[k])])
    for chosen in itertools.product(*options):
        by_operand = dict(zip(trained, chosen, strict=True))
        yield Strategy(
            tuple(Flow(p, by_operand.get(i, _conventional(p))) for i, p in enumerate(placements)),
            tuple(Flow(o, c) for o, c in zip(outs, pulled, strict=True)),
        )


def _conventional(placement: Placement) -> Placement:
    """The gradient that a tensor without one carries by convention."""
    return R if placement.is_partial else placement


def _gradients(outputs: Sequence[Tensor], operands: Sequence[Tensor], cotangents: Sequence[Tensor]) -> Sequence[Tensor]:
    import torch

    kept = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    return torch.autograd.grad(
        [o for o, _ in kept], operands, [c for _, c in kept], retain_graph=True, materialize_grads=True
    )


def _placements(tensor: Tensor, n: int) -> list[Placement]:
    sums: list[Placement] = [P()] if tensor.is_floating_point() else []
    return [R, *(S(d) for d, size in enumerate(tensor.shape) if size >= n and part(size, n, n - 1)[1] > 0), *sums]


def _normal(like: Tensor, random: torch.Generator) -> Tensor:
    import torch

    return torch.randn(like.shape, dtype=torch.float64, device="cpu", generator=random).to(like.dtype)


def spread(tensor: Tensor, placement: Placement, n: int, random: torch.Generator) -> list[Tensor]:
    """What n devices hold of a tensor."""
    if placement.is_shard:
        return [tensor.narrow(placement.dim, *part(tensor.shape[placement.dim], n, i)).contiguous() for i in range(n)]
    if placement.is_partial:
        parts = [_normal(tensor, random) for _ in range(n - 1)]
        return [*parts, tensor - sum(parts)]
    return [tensor] * n


def lies(parts: Sequence[Tensor], placement: Placement, whole: Tensor) -> bool:
    """Are these the parts of `whole` under the placement?"""
    import torch

    n = len(parts)
    if any(
        tuple(p.shape) != _part_shape(tuple(whole.shape), placement, n, i) or p.dtype != whole.dtype
        for i, p in enumerate(parts)
    ):
        return False
    together = (
        torch.cat(list(parts), placement.dim) if placement.is_shard else sum(parts) if placement.is_partial else None
    )
    tolerance = _TOLERANCE.get(str(whole.dtype).removeprefix("torch."), 0.0)
    scale = max(
        1.0,
        float(whole.abs().max())
        if whole.numel() and whole.is_floating_point() and bool(torch.isfinite(whole).all())
        else 1.0,
    )
    return all(
        torch.allclose(p, whole, rtol=0.0, atol=tolerance * scale, equal_nan=True)
        for p in ([together] if together is not None else parts)
    )


def _part_shape(shape: tuple[int, ...], placement: Placement, n: int, i: int) -> tuple[int, ...]:
    if not placement.is_shard:
        return tuple(shape)
    return (*shape[: placement.dim], part(shape[placement.dim], n, i)[1], *shape[placement.dim + 1 :])


# -- ops of a graph


def suspected(op: Any, arguments: dict[str, Any], types: Sequence[Any], outputs: Sequence[Any]) -> str:
    """A line of notation under which an op without a rule ran right in every draw.

    Nothing where it cannot be run small, or where nothing seems to be cut.

    `arguments` have types in the places of tensors. The op runs on small tensors, in which every larger size of the
    call is another odd multiple of six; numbers among its arguments that are such sizes follow.
    """
    assignments = math.prod(len(t.shape) + 2 for t in (*types, *outputs))
    if assignments > MOST or any("complex" in t.dtype for t in (*types, *outputs)) or _says_places(arguments):
        return ""
    key = (op, repr(arguments), tuple(types), tuple(outputs))
    if key not in _KNOWN:
        small = _small([n for t in types for n in t.shape])
        sets = [found for draw in DRAWS if (found := _drawn(op, arguments, types, outputs, small, draw)) is not None]
        _KNOWN[key] = _line(set.intersection(*sets), types, outputs) if sets else ""
    return _KNOWN[key]


_KNOWN: dict[Any, str] = {}


def _line(found: set[Strategy], types: Sequence[Any], outputs: Sequence[Any]) -> str:
    """The cuts of these strategies as one line.

    Sums of operands are not suggested, since linearity is not seen by trying.
    """
    letters: dict[tuple[int, int], str] = {}
    for strategy in sorted(found, key=repr):
        ends = [*strategy.operands, *strategy.outputs]
        cut = [(i, f.value.dim) for i, f in enumerate(ends) if f.value.is_shard]
        inside = len(strategy.operands)
        if (
            not any(i < inside for i, _ in cut)
            or any(f.value.is_partial for f in strategy.operands)
            or any(place in letters for place in cut)
        ):
            continue
        letters |= dict.fromkeys(cut, "abcdefghijklmnopqrstuvwxyz"[len(set(letters.values())) % 26])
    if not letters:
        return ""
    rows = [
        " ".join(letters.get((i, d), f"w{i}_{d}!") for d in range(len(t.shape)))
        for i, t in enumerate((*types, *outputs))
    ]
    return f"{', '.join(rows[: len(types)])} -> {', '.join(rows[len(types) :])}"


def _says_places(value: Any) -> bool:
    """Is there a slice of a dim in it?"""
    if isinstance(value, slice):
        return value != slice(None)
    return (
        any(map(_says_places, value.values() if isinstance(value, dict) else value))
        if isinstance(value, (dict, list, tuple))
        else False
    )


def _small(sizes: Sequence[int]) -> dict[int, int]:
    """Another small size for each: what is at most six stays, others are odd multiples of six."""
    larger = sorted({n for n in sizes if n > 6})
    return {n: 6 * (2 * i + 1) if n > 6 else n for i, n in enumerate(larger)} | {n: n for n in sizes if n <= 6}


@dataclass(frozen=True, slots=True)
class Draw:
    """How numbers are drawn: floats of a scale, or from a list; whole numbers from a list."""

    scale: float = 0.0
    floats: tuple[float, ...] = ()
    whole: tuple[int, ...] = (0, 1)


DRAWS = (
    Draw(scale=1.0),
    Draw(scale=1e-3, whole=(0, 1, 2, 3, 4, 5)),
    Draw(scale=1e4, whole=(-100, -1, 0, 1, 2, 5)),
    Draw(floats=(0.0, 1.0, -1.0, 0.0, 2.0, 1.0, -100.0, 0.5), whole=(-(2**31), -100, -1, 0, 0, 1, 1, 7, 2**31 - 1)),
    Draw(floats=(0.0, 1.0, -1.0, 1e30, math.inf, -math.inf, math.nan), whole=(0, 0, 0, 1)),
)


def constants_of(op: Any) -> tuple[float, ...]:
    """The numbers that stand in the code of an op, where it is Python: a token that it looks for, a bound."""
    from autopar.runtime.private import function_of  # torch is not imported with this module

    call = op.call
    behind = function_of(call._schema.name) if hasattr(call, "_schema") else call
    code = getattr(behind, "__code__", None)
    numbers = [c for c in (code.co_consts if code else ()) if isinstance(c, (int, float)) and not isinstance(c, bool)]
    return tuple(dict.fromkeys(numbers))


def _drawn(
    op: Any, arguments: dict[str, Any], types: Sequence[Any], outputs: Sequence[Any], small: dict[int, int], how: Draw
) -> set[Strategy] | None:
    import torch

    from autopar.graph.graph import TensorType

    random = torch.Generator().manual_seed(0)
    if op.signature is not None:  # tensors are handed out in the order of the signature, as operands are
        arguments = {n: arguments[n] for n in op.signature.parameters if n in arguments}
    own = constants_of(op)

    def draw(type_: Any) -> Tensor:
        shape = [small[n] for n in type_.shape]
        if "float" in type_.dtype and how.scale:
            return (torch.randn(shape, dtype=torch.float64, device="cpu", generator=random) * how.scale).requires_grad_(
                type_.requires_grad
            )
        pool = [*how.floats, *own] if "float" in type_.dtype else [*how.whole, *(n for n in own if isinstance(n, int))]
        numbers = torch.tensor(pool, dtype=torch.float64, device="cpu")
        picked = numbers[torch.randint(0, len(pool), shape, device="cpu", generator=random)]
        if "float" in type_.dtype:
            return picked.requires_grad_(type_.requires_grad)
        bounds = torch.iinfo(type_.torch_dtype) if type_.dtype != "bool" else None
        return (picked.clamp(bounds.min, bounds.max) if bounds else picked).to(type_.torch_dtype)

    def fill(value: Any, tensors: Any) -> Any:
        if isinstance(value, TensorType):
            return next(tensors)
        if isinstance(value, (tuple, list)):
            return type(value)(fill(v, tensors) for v in value)
        return (
            small.get(value, value) if isinstance(value, int) and not isinstance(value, bool) and value > 6 else value
        )

    operands = tuple(draw(t) for t in types)
    call = Call(
        operands, lambda tensors: op.run({k: fill(v, it) for it in [iter(tensors)] for k, v in arguments.items()})
    )
    try:
        first = _tuple(call.run(operands))
        if [r.dim() for r in first] != [len(t.shape) for t in outputs] or any(
            n != small.get(m, max(n, 1) if m > 6 else m)
            for r, t in zip(first, outputs, strict=True)
            for n, m in zip(r.shape, t.shape, strict=True)
        ):
            return set()
        if [r.requires_grad for r in first] != [t.requires_grad for t in outputs]:
            return set()
        return universe(call)
    except Exception:  # it does not run on these numbers
        return None


def _tuple(result: Any) -> tuple[Tensor, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)

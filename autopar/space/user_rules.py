"""A user's rule is tried before it is believed: every strategy that it gives runs on small random parts.

At the first use of a rule its op runs on a few small calls like the user's, in the draws of discovery and on two and
three devices, forward and backward. A strategy whose parts do not make up the whole refutes the rule, and the letter
says where. What cannot be tried, such as an op without a kernel for CPUs, is said in the plan. Verdicts are kept by the
small call: batches of other sizes, and the next plan, try nothing again.

A rule of autopar's own table is not tried here: its tests prove it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autopar.graph.graph import TensorType
from autopar.graph.nodes import WrittenCall
from autopar.letters import BadRule
from autopar.ops.declare import users_rule
from autopar.ops.entry import SHAPE, SIZES, Op, exchanges_of, facts_of, goes_beyond
from autopar.ops.exchange import Messages, is_said, messages_of, misfit
from autopar.ops.local import OpCall, on_device
from autopar.runtime.private import function_of
from autopar.sharding.notation import NAMES, Binding, Cut, Rule, parse, public_name
from autopar.sharding.placement import every_part_holds_something
from autopar.sharding.strategies import Strategy, strategies_on_one_axis
from autopar.space.inside import looked_inside
from autopar.space.limits import LIMITS
from autopar.space.small_calls import DRAWS, Draw, drawn, filled, resized, shrunk, small_sizes
from autopar.space.trial import DEVICES, CannotRun, Devices, Fault, Part, Trial, tupled

# Discovery's draws but the last, whose numbers nearly overflow: a function of their sum depends on how it rounds.
_DRAWS = (
    *DRAWS[:-1],
    Draw(floats=(0.0, 1.0, -1.0, math.inf, -math.inf, math.nan), whole=(0, 0, 0, 1)),
    Draw(scale=1.0, one=math.nan),
)
_ONE_AT_A_TIME = threading.RLock()
_NO_RULE = parse(" -> ")


@dataclass(frozen=True, slots=True)
class _Small:
    """A small call of an op with a rule: what a verdict is known by."""

    call: WrittenCall
    places: tuple[str, ...]  # "tensor", "number" or "absent", for each operand of the rule
    rule: Rule
    keeps_dtype: bool  # else floats are in double precision

    def bound(self, outputs: Sequence[tuple[int, ...]]) -> Binding:
        """The rule on this call, where its outputs have these shapes; raises where it does not fit."""
        types = iter(self.call.operands)
        shapes = [next(types).shape if kind == "tensor" else () if kind == "number" else None for kind in self.places]
        numbers = {i for i, kind in enumerate(self.places) if kind == "number"}
        return self.rule.bind(shapes, outputs).without(numbers)

    @property
    def elements(self) -> int:
        return sum(math.prod(t.shape) for t in self.call.operands)


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What trials of one small call have shown."""

    cuts: frozenset[tuple[str, ...]] = frozenset()  # factors whose cuts ran right
    why_not: tuple[tuple[tuple[str, ...], str], ...] = ()  # why a cut, or () for all, was not tried
    refuted: tuple[Strategy, int, Fault, tuple[str, ...]] | None = None  # strategy, devices, fault, operands
    # messages that the local form sends on how many devices, and those that its entry says, where they differ
    unsaid: tuple[Strategy, int, Messages, Messages] | None = None


def untried(call: WrittenCall, places: Sequence[str], rule: Rule, binding: Binding, source: str) -> str:
    """Try a user's rule on calls like this one, and return text about what could not be tried.

    Raises where the rule is false.
    """
    wanted = {cut.factors for cut in binding.cuts()}
    shown: set[tuple[str, ...]] = set()
    why: dict[tuple[str, ...], str] = {}
    ran = False
    for small in _small_calls(call, tuple(places), rule, binding):
        verdict = _verdict(small, frozenset(wanted - shown) if ran else None)
        if verdict.refuted is not None:
            raise _letter(call.op.name, rule, verdict.refuted, source)
        if verdict.unsaid is not None:
            strategy, n, sent, said = verdict.unsaid
            raise misfit(call.op.name, sent, said, source, f"{strategy} on {n} devices")
        why = {**why, **dict(verdict.why_not)}
        ran = ran or () not in dict(verdict.why_not)
        shown |= verdict.cuts
        if ran and wanted <= shown:
            break
    if not ran:
        return why.get((), "none of the small calls like it fits the rule")
    left = sorted(wanted - shown)
    missing = [f"cut along {_named(factors)}: {why.get(factors, 'no small call can be cut so')}" for factors in left]
    return "; ".join([*missing, *(why[key] for key in (("backward",),) if key in why)])


def takes_sums(call: WrittenCall, strategy: Strategy) -> bool:
    """Whether an op without a rule ran right under a strategy that hands gradients on as sums of parts.

    A backward of a user's own need not be linear: one that clips its gradient wants the sum. What cannot be tried is
    False: nobody has said anything of the op.
    """
    shapes = [n for t in call.operands for n in t.shape]
    for sizes in (small_sizes(shapes), {}):
        small = shrunk(call, sizes)
        for keeps_dtype in (False, True):
            made = _Small(small, (), _NO_RULE, keeps_dtype)
            if made.elements <= LIMITS.elements and (ran := _ran(made, strategy)) is not None:
                return ran
    return False


@functools.lru_cache(maxsize=256)
def _ran(small: _Small, strategy: Strategy) -> bool | None:
    """Whether a small call ran right under a strategy in two draws; None where it does not run."""
    state = torch.get_rng_state()
    try:
        for draw in (_DRAWS[0], _DRAWS[2]):
            operands = drawn(small.call, draw, small.keeps_dtype)
            tolerance, hidden = looked_inside(lambda: _results(small, operands), is_python(small.call.op))
            if hidden or Devices(_trial(small, operands, max(tolerance, LIMITS.large_or_tiny)), 2).fault(strategy):
                return False
    except Exception:
        return None
    finally:
        torch.set_rng_state(state)
    return True


def _letter(name: str, rule: Rule, refuted: tuple[Strategy, int, Fault, tuple[str, ...]], source: str) -> BadRule:
    """The letter about a rule that a trial has refuted."""
    strategy, n, fault, operands = refuted
    what = _in_words(fault.what)
    if strategy.cut is not None:
        way = f"cut along {_named(strategy.cut.factors)}{' by blocks' if strategy.cut.blocks else ''}"
        cuttable = [f for f in strategy.cut.factors if not f.startswith("...")]
        advice = f"{cuttable[0]}!, which stays whole" if cuttable else "a letter with ! for the dim that stays whole"
        if facts_of(name).form is not None:
            advice = f"{_of_form(strategy.cut, what)}, or {advice}"
    elif any(f.value.is_partial for f in strategy.operands):
        way, advice = "on sums in parts", f"another linear= than {rule.linear!r}"
    else:
        way = "with a gradient that arrives in parts"
        advice = "no rule, with which every device computes it whole: a backward that is not linear in its gradient"
    differs = (
        f"differs by up to {fault.largest:.3g}"
        if math.isfinite(fault.largest)
        else "has another shape or dtype, or infinities and NaNs elsewhere"
    )
    part, whole = (list(shape) for shape in fault.shapes)
    seen = (
        f"{strategy} on {n} devices, on {', '.join(operands)}: {what} {differs} (a part of {part}, the whole {whole})"
    )
    return BadRule(
        f"the rule of {public_name(name)} is false: {way}, {what} is not what the op computes",
        at=f"{users_rule(name)}\nused at {source}" if source else users_rule(name),
        seen=seen,
        advice=advice,
    )


def _of_form(cut: Cut, what: str) -> str:
    """Advice about an op whose local form may be what is wrong; `what` differs."""
    if cut.blocks:
        return "counts= in the entry, with which it is not cut by blocks"
    if what.startswith("output"):
        return "the local form, which runs there"
    return "the local form's backward (a gradient may have to be summed, as forms.exchanged does)"


def _named(factors: Sequence[str]) -> str:
    return "a leading dim" if factors[0].startswith("...") else "|".join(factors)


def _in_words(what: str) -> str:
    """`output 0`, or the operand of a gradient by the name that `linear=` has for it."""
    head, _, number = what.rpartition(" ")
    return what if head == "output" else f"{head} {NAMES[int(number)]}"


# -- small calls


def _small_calls(call: WrittenCall, places: tuple[str, ...], rule: Rule, binding: Binding) -> Iterator[_Small]:
    """Small calls like this one, in the order of trial: of distinct sizes, of legal sizes, of its own."""
    seen: set[Any] = set()
    for sizes in _factor_sizes(call, rule, binding):
        rows = [row for row, kind in zip(binding.operands, places, strict=True) if kind == "tensor"]
        shapes = [_shape(row, type_.shape, sizes) for row, type_ in zip(rows, call.operands, strict=True)]
        of_dims = {n: m for t, s in zip(call.operands, shapes, strict=True) for n, m in zip(t.shape, s, strict=True)}
        small = resized(call, shapes, {**{binding.sizes[f]: n for f, n in sizes.items()}, **of_dims})
        for keeps_dtype in (False, True):
            made = _Small(small, places, rule, keeps_dtype)
            if made.elements <= LIMITS.elements and made not in seen:
                seen.add(made)
                yield made


def _shape(row: Sequence[Any] | None, shape: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """A small shape by the sizes of its dims' factors."""
    if row is None:
        return shape
    many: dict[str, Callable[[Any], int]] = {"*": math.prod, "|": sum, "": math.prod}
    return tuple(
        many[dim.joined](sizes[f] for f in dim.factors) if dim.factors and n > 1 else n
        for dim, n in zip(row, shape, strict=True)
    )


def _factor_sizes(call: WrittenCall, rule: Rule, binding: Binding) -> Iterator[dict[str, int]]:
    """Small sizes of the factors, in several ways: an op may ask for more of them than its rule says.

    Equal sizes stay equal, and those that the rule itself says are kept.
    """
    given, sizes = dict(rule.given), binding.sizes
    # The order is the rule's, not that of sizes: a call with more rows then has the same small call.
    cut = list(dict.fromkeys(sizes[f] for c in binding.cuts() for f in c.factors if sizes[f] > 1))
    whole = list(dict.fromkeys(n for n in sizes.values() if n > 6 and n not in cut))
    odd, close, wide = ([first + i * step for i in range(len(sizes))] for first, step in ((6, 12), (6, 3), (48, 48)))
    numbers = list(_numbers(call.arguments))
    units = {n: math.lcm(*(k for k in numbers if 1 < k < n and n % k == 0)) for n in sizes.values()}
    for small in (
        dict(zip(cut, odd)) | dict(zip(whole, _but(odd, 7))),  # parts odd and even, no size twice
        dict(zip(cut, close)) | dict(zip(whole, _but(close, 7))),  # sizes close together, for fewer elements
        dict(zip(dict.fromkeys(n for n in sizes.values() if n > 6), odd)),  # few of something stay as few
        {n: min(n, unit * 6) for n, unit in units.items() if n > 6},  # multiples of numbers among the arguments
        dict(zip(cut, wide)) | {n: 16 << i for i, n in enumerate(whole)},  # sizes that kernels ask for
        dict(zip(cut, close)),  # dims that stay whole keep their sizes
        {},
    ):
        yield {f: given.get(f, small.get(n, n)) for f, n in sizes.items()}


def _but(taken: Sequence[int], first: int) -> Iterator[int]:
    """The numbers from `first` on that are not taken."""
    return (n for n in itertools.count(first) if n not in taken)


def _numbers(value: Any) -> Iterator[int]:
    """The whole numbers among a call's arguments."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for v in value:
            yield from _numbers(v)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value


# -- verdicts


def _verdict(small: _Small, missing: frozenset[tuple[str, ...]] | None) -> _Verdict:
    """The verdict of one small call; it runs on one thread, and torch's generator does not move."""
    with _ONE_AT_A_TIME:
        threads, state = torch.get_num_threads(), torch.get_rng_state()
        torch.set_num_threads(1)
        try:
            return tried(small, missing)
        finally:
            torch.set_num_threads(threads)
            if not torch.equal(torch.get_rng_state(), state):
                torch.set_rng_state(state)


@functools.lru_cache(maxsize=256)
def tried(small: _Small, missing: frozenset[tuple[str, ...]] | None) -> _Verdict:
    """Run the strategies of a rule on one small call in every draw that the op takes.

    With `missing`, other small calls have shown the rest: only cuts along these factors run, in one draw.
    """
    why: dict[tuple[str, ...], str] = {}
    cuts: set[tuple[str, ...]] = set()
    ran = False
    if any("complex" in t.dtype for t in small.call.operands):
        return _Verdict(why_not=(((), "no number is drawn for complex operands"),))
    tolerance = 0.0
    draws = _DRAWS if small.elements <= LIMITS.elements_in_all_draws else (_DRAWS[0], _DRAWS[3])
    for draw in draws if missing is None and is_python(small.call.op) else draws[:1]:
        try:
            operands, without_backward = _operands(small, draw)
            if not ran:
                tolerance, hidden = looked_inside(lambda: _results(small, operands), is_python(small.call.op))
                if hidden:
                    return _Verdict(why_not=(((), hidden),))
            least = 0.0 if draw.scale in (0.0, 1.0) else LIMITS.large_or_tiny
            trial = _trial(small, operands, max(tolerance, least))
            devices = [Devices(trial, n) for n in DEVICES]
            strategies, sizes = _strategies(small, devices[0])
        except Exception as e:  # The op may refuse the numbers of one draw and take those of another.
            why.setdefault((), f"it does not run on small tensors: {_first_line(e)}")
            continue
        ran = True
        if without_backward:
            why["backward",] = f"its backward does not run: {without_backward}"
        for on, strategy in itertools.product(devices, strategies):
            is_shown = missing is not None and not (strategy.cut and strategy.cut.factors in missing)
            if is_shown or not _may_be_summed(on, strategy) or not _is_possible(strategy.cut, sizes, on.n):
                continue
            try:
                fault = on.fault(strategy)
            except CannotRun as e:
                why.setdefault(strategy.cut.factors if strategy.cut else ("unused",), f"a part raises {_first_line(e)}")
                continue
            if fault is not None:
                return _Verdict(refuted=(strategy, on.n, fault, tuple(map(_told, operands))))
            if unsaid := _unsaid(small, operands, strategy, on):
                return unsaid
            cuts |= {strategy.cut.factors} if strategy.cut else set()
    if ran:
        why.pop((), None)
    return _Verdict(frozenset(cuts), tuple(why.items()))


def is_python(op: Op) -> bool:
    """Whether an op is written in Python, whose kernels check their indices."""
    schema = getattr(op.call, "_schema", None)
    return schema is None or schema.name.startswith("aten::") or function_of(schema.name) is not None


def _operands(small: _Small, draw: Draw) -> tuple[tuple[Tensor, ...], str]:
    """Random operands; without gradients, and why, where the op runs and its backward does not.

    Constants of the op's own code are left out where they are no indices of its operands.
    """
    for with_constants in (True, False):
        operands = drawn(small.call, draw, small.keeps_dtype, with_constants)
        try:
            Devices(_trial(small, operands, 0.0), 1)
            return operands, ""
        except Exception as e:
            why = e
        plain = tuple(t.detach() for t in operands)
        if any(t.requires_grad for t in operands):
            with contextlib.suppress(Exception):
                _results(small, plain)
                return plain, _first_line(why)
    raise why


def _results(small: _Small, operands: Sequence[Tensor]) -> Any:
    return small.call.op.run(filled(small.call.arguments, operands))


def _trial(small: _Small, operands: tuple[Tensor, ...], tolerance: float) -> Trial:
    """The call as devices run it: in its local form where it has one, whose devices exchange messages."""
    op, has_form = small.call.op, facts_of(small.call.op.name).form is not None
    if not has_form and op.local(SHAPE) is None and op.local(SIZES) is None:
        return Trial(operands, lambda tensors: _results(small, tensors), tolerance=tolerance)
    call = _call(small, operands)

    def local(tensors: Sequence[Tensor], here: Part) -> Any:
        function, kwargs = on_device(op, here, call, filled(small.call.arguments, tensors))
        return function.run(kwargs) if isinstance(function, Op) else function(**kwargs)

    return Trial(operands, lambda tensors: _results(small, tensors), local, has_form, tolerance)


def _call(small: _Small, operands: Sequence[Tensor]) -> OpCall:
    """The small call in the whole, as local forms are told it."""
    outputs = tuple(map(TensorType.of, tupled(_results(small, operands))))
    return OpCall(small.call.op.name, small.call.arguments, outputs)


def _unsaid(small: _Small, operands: Sequence[Tensor], strategy: Strategy, on: Devices) -> _Verdict | None:
    """The verdict where a form sent other messages than its entry says; None where it did not."""
    if not on.trial.communicates:
        return None
    call = _call(small, operands)
    is_marked = goes_beyond(call.op, small.bound([t.shape for t in call.outputs]), strategy.cut)
    said = messages_of(exchanges_of(call) if is_marked else (), on.n)
    if is_said(on.messages, said, small.call.operands):
        return None
    return _Verdict(unsaid=(strategy, on.n, on.messages, said))


def _strategies(small: _Small, devices: Devices) -> tuple[list[Strategy], dict[str, int]]:
    """The strategies of the rule on a small call, also those that cut blocks, and its factors' sizes."""
    binding = small.bound([tuple(e.shape) for e in devices.expected])
    if not all(e.is_floating_point() for e in devices.expected):
        binding = replace(binding, groups=())
    wants = [False] * len(small.places)
    trained = iter(devices.whole)
    for i, kind in enumerate(small.places):
        wants[i] = next(trained).requires_grad if kind == "tensor" else False
    counts = re.compile(facts_of(small.call.op.name).counts or "$.")
    pieces = {f: n for f, n in binding.sizes.items() if not counts.fullmatch(f)}
    blocks = {f: {(n // k,) * k for k in (2, 3) if n % k == 0 and n > k} for f, n in pieces.items()}
    gives = [e.requires_grad for e in devices.expected]
    return list(strategies_on_one_axis(binding, wants, gives, blocks)), binding.sizes


def _is_possible(cut: Cut | None, sizes: Mapping[str, int], n: int) -> bool:
    """Whether n devices can cut so that each of them has a part."""
    if cut is None:
        return True
    if cut.blocks:
        return all(block % n == 0 for block in cut.blocks)
    if cut.even:
        return all(sizes[f] % n == 0 for f in cut.factors)
    return all(every_part_holds_something(sizes[f], [n]) for f in cut.factors)


def _has_sums(strategy: Strategy) -> bool:
    """Whether a value or gradient is a sum of parts."""
    return any(f.value.is_partial or f.gradient.is_partial for f in (*strategy.operands, *strategy.outputs))


def _may_be_summed(devices: Devices, strategy: Strategy) -> bool:
    """Whether the strategy's sums can be split: infinities and extreme integers cannot."""
    if not _has_sums(strategy):
        return True
    sums = (t for t, flow in zip(devices.whole, strategy.operands, strict=True) if flow.value.is_partial)
    return devices.is_finite and all(t.is_floating_point() or _is_far_from_the_ends(t) for t in sums)


def _is_far_from_the_ends(tensor: Tensor) -> bool:
    """Whether small numbers can be taken from whole ones, and these have signs."""
    if tensor.dtype == torch.bool:
        return False
    bounds = torch.iinfo(tensor.dtype)
    return bounds.min < 0 and bool((tensor.long().abs() < bounds.max - 64).all())


def _told(tensor: Tensor) -> str:
    return str(TensorType.of(tensor))


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__

"""Entries of ops: one entry holds all that the compiler knows of an op.

    op("mm", torch.mm, "input:T, mat2:T", T.mm, rule="m k, k n -> m n", linear="x, y", keeps="input:mat2 mat2:input")

An op is the torch function that computes it; `:T` marks its tensor operands, in the order in which rules name them. A
spelling may pass its arguments in another order; `lookup` gives them by name. A function that has no entry becomes an
op of its own name: it can be replayed, and runs replicated until somebody writes a rule. Every op is pure: what writes
in torch is here the form that returns a new tensor.

The entries stand by families in the files beside this one; `Facts` lists what they may say.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.letters import BadRule
from autopar.ops.exchange import Along, Exchange, Exchanges, read_exchanges
from autopar.ops.inverses import WrittenView
from autopar.sharding.notation import Binding, Cut, Rule, parse

if TYPE_CHECKING:
    from autopar.ops.local import Form, Here, OpCall

RuleFunction = Callable[[Mapping[str, Any]], "Rule | None"]
Sizes = tuple[float, float, float, float]  # batch, m, n and k of [batch, m, k] by [batch, k, n]


class Kernels(NamedTuple):
    """The kernels of an op that runs several, on a device."""

    forward: Sequence[Sizes]  # matrix products
    backward: Sequence[Sizes]
    passed: float  # bytes that others read and write in forward
    passed_back: float


FormFunction = Callable[["Here", "OpCall", dict[str, Any]], "Form"]


class SHAPE:
    """Marks an argument that is the output's shape: on a device it is the local one."""


class SIZES:
    """Marks an argument that lists the outputs' sizes along `dim`."""


# a second size of a product's time: where it is small, reading and writing bound it
INTENSITY = "FLOPs for each element of its first operand and its result"


@dataclass(frozen=True, slots=True)
class Op:
    """A canonical op: `call(**arguments)` computes it. Ops of one name and one function are equal."""

    name: str
    call: Callable[..., Any]
    # None: an op by its own name, arguments by position
    signature: inspect.Signature | None = field(repr=False, compare=False, default=None)

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by name; those that equal their default are left out."""
        if self.signature is None:
            return {**{f"_{i}": a for i, a in enumerate(args)}, **kwargs}
        bound = self.signature.bind(*args, **kwargs).arguments
        defaults = {n: p.default for n, p in self.signature.parameters.items() if p.default is not p.empty}
        return {n: v for n, v in bound.items() if not (n in defaults and same(v, defaults[n]))}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    @property
    def __name__(self) -> str:
        return self.name

    def operands(self, arguments: Mapping[str, Any]) -> list[Any]:
        """The operands that rules speak of, in order: tensors, numbers in their place, None if absent."""
        if self.signature is None:
            leaves = pytree.tree_leaves(list(arguments.values()))
            return [leaf for leaf in leaves if isinstance(leaf, (fx.Node, Tensor))]
        found = [arguments.get(n, default) for n, default in _tensors(self)]
        return [leaf for value in found for leaf in (value if isinstance(value, (list, tuple)) else [value])]

    def local(self, annotation: Any) -> str | None:
        """Name of the argument that is the output's shape (`SHAPE`) or sizes (`SIZES`), or None."""
        parameters = self.signature.parameters.items() if self.signature else ()
        return next((n for n, p in parameters if p.annotation is annotation), None)

    def run(self, arguments: Mapping[str, Any]) -> Any:
        """Compute the op on arguments by name."""
        if self.signature is not None:
            return self.call(**arguments)
        by_place = {n: v for n, v in arguments.items() if n[0] == "_" and n[1:].isdigit()}
        return self.call(*by_place.values(), **{n: v for n, v in arguments.items() if n not in by_place})


@functools.cache
def _tensors(op: Op) -> tuple[tuple[str, Any], ...]:
    """Names and defaults of an op's tensor arguments, in order."""
    parameters = op.signature.parameters.items() if op.signature else ()
    return tuple((n, p.default) for n, p in parameters if p.annotation is Tensor)


def same(value: Any, default: Any) -> bool:
    """Whether a value is the default, or equals it and has its type; tensors are compared by identity."""
    return value is default or (not isinstance(value, Tensor) and type(value) is type(default) and value == default)


@dataclass(frozen=True, slots=True)
class Apply:
    """An autograd.Function as a function of tensors, with its own forward and backward."""

    cls: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.cls.apply(*args, **kwargs)

    @property
    def __name__(self) -> str:
        return f"function {self.cls.__module__}.{self.cls.__qualname__}"


@dataclass(frozen=True, slots=True)
class OnACopy:
    """A function that writes to its first argument, made pure by passing a copy."""

    function: Callable[..., Any]

    def __call__(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.function(input.clone(), *args, **kwargs)

    @property
    def __name__(self) -> str:
        return f"{self.function.__name__} on a copy"


@dataclass(frozen=True, slots=True)
class Line:
    """The values that an op keeps for its backward."""

    # Names of arguments, and "out"; with each the argument whose gradient needs it, "" where any does.
    values: tuple[tuple[str, str], ...]
    # Other saved tensors: kind of device, bytes, and the argument as which they are cut; "": the first operand.
    extra: tuple[tuple[str, str, str], ...] = ()

    @staticmethod
    def of(text: str, **extra: str) -> Line:
        """Parse a line, such as `Line.of("input:weight weight:input", cpu="8*rows")`.

        This line keeps each of two operands for the other's gradient.
        """
        pairs = [piece.partition(":")[::2] for piece in text.split()]
        return Line(tuple(pairs), tuple((kind, formula, "") for kind, formula in extra.items()))

    def beside(self, argument: str, kind: str, formula: str) -> Line:
        """The line with more that is made besides, which is cut as this argument."""
        return Line(self.values, (*self.extra, (kind, formula, argument)))


@dataclass(slots=True)
class Facts:
    """All that the compiler knows of an op beside how it is called; an op that nobody described has defaults."""

    rule: Rule | RuleFunction | None = None  # how it may be cut: `docs/rules.md`
    serves: str = ""  # the marks of rules that its local form or its local shape serves
    form: FormFunction | None = None  # the local form: computes a part where the op itself would be wrong
    # All-reduces of the local form, forward and backward, where a counted or reduced dim is cut; or its `Exchange`s.
    # A function of the call, and of where the form sends, where that is known.
    exchanges: Exchanges | Callable[[OpCall, Along | None], Exchanges] = (0, 0)
    draws: bool = False  # random: the local form draws by the position in the whole tensor
    keeps: Line | Callable[[OpCall, str], Line] | None = None  # saved for backward, by kind of device; None: everything
    work: Callable[[OpCall], tuple[str, str]] | tuple[str, str] | None = None  # temporary bytes, forward and backward
    # More temporary bytes of the local form, on a device that holds parts of these shapes of each operand.
    part_work: Callable[[OpCall, Any, str, Here], tuple[int, int]] | None = None
    # More bytes that the local form saves for backward, on a device that holds parts of these shapes.
    part_keeps: Callable[[OpCall, Any, Here], int] | None = None
    flops: tuple[float, str] | None = None  # a product's FLOPs per point of its factors except this pattern's
    products: Callable[[OpCall, Here, str], Kernels] | None = None  # kernels of a call of several products
    windows: bool = False  # reads windows of its input; a product then has other kernels than one of rows
    # Attention, whose kernels are timed by head width and sequence length: the share of its queries by its keys that
    # the fullest device computes.
    scores: Callable[[OpCall, Here], float] | None = None
    # Number of times that forward reads its first operand: twice where sums over it are needed first.
    reads: int = 1
    free: bool = False  # a view, which takes no time
    same: bool = False  # a cast or a reshape, which a sharded parameter may pass before it is gathered
    moved: bool = False  # moves elements of its operand without changing them
    # A view's inverse: carries a write to the view back to its base.
    inverse: Callable[[WrittenView], Any] | None = None
    truth: bool = False  # the result is boolean
    overwrites: bool = False  # the result has the operand's shape, and ignores its values
    one_dtype: bool = False  # all operands have one dtype
    one_gradient: bool = False  # the gradient is the same number on every device, never partial
    loss: bool = False  # has a reduction, which becomes an op of its own in the graph
    joint: bool = False  # one kernel gives the gradients of all operands, where a product has one for each
    spreads: bool = False  # the gradient of an operand that is broadcast is a sum of its own
    timed: Callable[[Mapping[str, Any]], str] | None = None  # name of its measured time, where a call decides it
    # Second variable of its time, next to the amount of work: a dim's size (operand, dim), or INTENSITY.
    second_size: tuple[int, int] | str | None = None
    # Completes arguments that a call leaves to torch.
    settle: Callable[[Op, dict[str, Any], Any], tuple[Op, dict[str, Any]]] | None = None
    counts: str = ""  # the pattern of factors along which its local form counts positions
    # Key of `TRANSFERS` in `module/reach/check.py`: how padding passes through, where the rule does not say all.
    reach: str = ""
    sized: bool = False  # arguments may be sizes that follow the length of an input
    neutral: float | None = None  # a reduction's neutral element


OPS: dict[str, Op] = {}
FACTS: dict[str, Facts] = {}
PROVEN: set[str] = set()  # ops of autopar's own table, whose rules its tests prove
SPELLINGS: dict[Callable[..., Any], tuple[Op, inspect.Signature]] = {}
# Name of an op that writes -> its pure form, the arguments that it writes, and the flag under which it does.
WRITES: dict[str, tuple[Op, tuple[str, ...], str]] = {}
# a function of torch whose calls are read one by one: an op and its arguments, another function that means the same, or
# None where the function is spelled by an entry
Translator = Callable[
    [tuple[Any, ...], Mapping[str, Any], Any], "tuple[Op, dict[str, Any]] | Callable[..., Any] | None"
]
TRANSLATED: dict[Callable[..., Any], Translator] = {}
# a method that fills a tensor with draws: the op that makes a new one, and the names of its two numbers
FILLED: dict[str, tuple[str, tuple[str, ...]]] = {}
T = Tensor
# A function with the op's signature, or functions and then their own: `(torch.clone, T.clone, "input, memory_format")`.
Spelled = Callable[..., Any] | tuple[Any, ...]


def op(
    name: str, call: Callable[..., Any], signature: str, *spellings: Spelled, writes: str = "", **facts: Any
) -> None:
    """Add an op with its spellings; those with a signature of their own are a tuple that ends in it.

    The names in such a signature are those of the op.
    """
    OPS[name] = Op(name, call, read_signature(signature))
    spell(name, (call, signature), *(s if isinstance(s, tuple) else (s, signature) for s in spellings))
    describe(name, **facts)
    if writes:
        names, _, flag = writes.partition(" if ")
        written = tuple(names.split(", "))
        pure = f"{name}_updating"
        OPS[pure] = Op(pure, updating(call, *written), read_signature(signature))
        describe(pure, **facts)
        WRITES[name] = OPS[pure], written, flag


def spell(name: str, *spellings: tuple[Any, ...]) -> None:
    """Add functions that mean an op, tuples of them that end in a signature in the op's names."""
    for *functions, signature in spellings:
        SPELLINGS.update((function, (OPS[name], read_signature(signature))) for function in functions)


def translates(*functions: Callable[..., Any]) -> Callable[[Translator], Translator]:
    """Register the decorated function to read calls of these functions."""

    def register(translator: Translator) -> Translator:
        TRANSLATED.update(dict.fromkeys(functions, translator))
        return translator

    return register


def each(names: str, signature: str = "input:T", homes: Sequence[Any] = (torch, F, T), **facts: Any) -> None:
    """Add ops that have the same name in torch, Tensor and torch.nn.functional, or in other homes."""
    for name in names.split():
        first, *others = (getattr(home, name) for home in homes if hasattr(home, name))
        op(name, first, signature, *others, **facts)


def describe(
    name: str,
    rule: str | RuleFunction | None = None,
    linear: str = "",
    keeps: str | Callable[[OpCall, str], Line] | None = None,
    makes: Mapping[str, str] | None = None,
    serves: str = "",
    **facts: Any,
) -> None:
    """Set the facts of an op; `makes` are the bytes that it makes for its backward, by kind of device."""
    known = Facts(serves=serves, **facts)
    _check_form(name, known)
    FACTS[name] = known
    known.keeps = Line.of(keeps, **(makes or {})) if isinstance(keeps, str) else keeps
    if rule is not None:
        known.rule = parse(rule, linear) if isinstance(rule, str) else rule
    if isinstance(known.rule, Rule):
        check_marks(name, known.rule)


def _check_form(name: str, known: Facts) -> None:
    """Raise where an entry serves a mark, and says no local form, or not what the form counts or reduces."""
    if known.form is None and set(known.serves) & {"~", "^", "&"}:
        raise BadRule(
            f"{name} serves {known.serves} and has no local form", advice="form=, which computes it on a part"
        )
    if "~" in known.serves and not known.counts:
        raise BadRule(
            f"{name} is cut behind a mask (~), and its entry does not say along what its local form counts positions",
            advice='counts="v", the pattern of the factors that are cut in one range alone and not by blocks',
        )
    sends = callable(known.exchanges) or bool(read_exchanges(known.exchanges))
    if sends and not set(known.serves) & {"~", "^", "&"}:
        raise BadRule(
            f"{name} exchanges messages along no mark (~, ^), so that no plan would pay for them",
            advice="^ for what the local form reduces over devices, ~ for what it otherwise communicates along",
        )
    if "^" in known.serves and not sends:
        raise BadRule(
            f"{name} is reduced inside (^), and its entry says of no all-reduce: plans would take them for free",
            advice="exchanges=(1, 0), the all-reduces of its local form in forward and in backward",
        )


def exchanges_of(call: OpCall, along: Along | None = None) -> tuple[Exchange, ...]:
    """The messages of a call's local form along each axis on which it sends, or along one of them."""
    exchanges = facts_of(call.op).exchanges
    return read_exchanges(exchanges(call, along) if callable(exchanges) else exchanges)


def sends_along(op: str, rule: Rule | Binding, cut: Cut | None) -> bool:
    """Whether the local form sends messages along an axis with this cut."""
    return cut is not None and (cut.travels or goes_beyond(op, rule, cut))


def goes_beyond(op: str, rule: Rule | Binding, cut: Cut | None) -> bool:
    """Whether a cut makes an op run its local form, which knows its position or exchanges messages."""
    if cut is None:
        return False
    return not rule.inside.isdisjoint(cut.factors) or any(
        re.fullmatch(facts_of(op).counts, factor) for factor in cut.factors
    )


def updating(call: Callable[..., Tensor], *written: str) -> Callable[..., tuple[Tensor, ...]]:
    """The pure form of an op that writes to some arguments; it returns their new values and its result."""

    def pure(**arguments: Any) -> tuple[Tensor, ...]:
        fresh = {n: arguments[n].detach().clone() for n in written}
        return call(**{**arguments, **fresh}), *fresh.values()

    return pure


def facts_of(name: str) -> Facts:
    """The facts of an op, by the name that a graph prints."""
    return FACTS.get(name, _NOTHING)


_NOTHING = Facts()


def timed_name(name: str, arguments: Mapping[str, Any]) -> str:
    """The name under which a call is timed: the op's, or one that also says how it is called."""
    timed = facts_of(name).timed
    return timed(arguments) if timed else name


def rule_of(name: str, arguments: Mapping[str, Any]) -> Rule | None:
    """The rule of one call, or None where there is none; tensors among the arguments are types."""
    found = facts_of(name).rule
    if not callable(found):
        return found
    said = found({**arguments, "op": name})
    if said is not None:
        check_marks(name, said)
    return said


def check_marks(name: str, rule: Rule) -> None:
    """Raise where a rule has marks that no local form of the op serves."""
    if not (rule.masked or rule.inside or rule.made or rule.together):
        return
    known = facts_of(name).serves
    for mark, factors, meaning in (
        ("~", rule.masked, "cut behind a mask"),
        ("^", rule.inside, "reduced inside"),
        ("*", rule.made, "made here"),
        ("&", frozenset(factor for _, factor in rule.together), "sent to other devices"),
    ):
        if factors and mark not in known:
            raise BadRule(
                f"{name} has no local form for {' and '.join(sorted(factors))}{mark}: it would run as it is on "
                f"parts of what is {meaning}",
                seen=str(rule),
                advice=f"{min(factors)}!, which stays whole",
            )


def read_signature(text: str) -> inspect.Signature:
    """The signature that a line of an entry spells."""
    namespace: dict[str, Any] = {}
    known = {"T": Tensor, "SHAPE": SHAPE, "SIZES": SIZES}
    exec(compile(f"def f({text}): ...", "<entry>", "exec", dont_inherit=True), known, namespace)  # never a user's text
    found = inspect.signature(namespace["f"])
    hash(found)  # calls are looked up by it: with a list as a default none would be found
    return found

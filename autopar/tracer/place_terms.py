"""Read a function of places, such as the mask of flex_attention, without running it on all pairs of places.

It runs once, on symbols: fake tensors of no dims for a batch `b`, a head `h`, and the places `q_idx` of a query and
`kv_idx` of a key. A mode sees every torch function of a symbol, and notes it as a term:

    doc[b, q_idx] == doc[b, kv_idx]     eq(look(doc, b, q_idx), look(doc, b, kv_idx))

What the function computes from tensors of the model alone is recorded as ever.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar.letters import AutoparError, NotServed
from autopar.ops.entry import OPS
from autopar.ops.lookup import functional, lookup
from autopar.tracer.call import name_of, tensors_in
from autopar.tracer.place import source
from autopar.tracer.torch_functions import IN_PLACE_OPERATORS, READ_VALUES

if TYPE_CHECKING:
    from autopar.tracer.recorder import Recorder

_OPERATORS: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "ge": (">=", operator.ge),
    "gt": (">", operator.gt),
    "le": ("<=", operator.le),
    "lt": ("<", operator.lt),
    "eq": ("==", operator.eq),
    "ne": ("!=", operator.ne),
    "add": ("+", operator.add),
    "sub": ("-", operator.sub),
    "mul": ("*", operator.mul),
    "div": ("/", operator.truediv),
    "floor_divide": ("//", operator.floordiv),
    "remainder": ("%", operator.mod),
    "bitwise_and": ("&", operator.and_),
    "bitwise_or": ("|", operator.or_),
    "bitwise_xor": ("^", operator.xor),
}
_REFLECTED = {
    "Tensor.__rsub__": "sub",
    "Tensor.__rdiv__": "div",
    "Tensor.__rtruediv__": "div",
    "Tensor.__rfloordiv__": "floor_divide",
    "Tensor.__rmod__": "remainder",
}
_BY_ELEMENT = frozenset(
    (*_OPERATORS, *"abs neg logical_and logical_or logical_not logical_xor bitwise_not where to".split())
)
_CONSTANTS = {"ones": True, "ones_like": True, "zeros": False, "zeros_like": False}
CONSTANT = "constant"
LOOK = "look"
HOW_TO_SAY = (
    "conditions joined by &: q_idx >= kv_idx, q_idx - kv_idx < window, q_idx // chunk == kv_idx // chunk, "
    "doc[b, q_idx] == doc[b, kv_idx], kv_idx < length[b], valid[b, kv_idx]; or scaled_dot_product_attention with a mask"
)


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """A symbol, by its name alone, or an op of terms, numbers, and tensors of the model."""

    name: str
    given: Mapping[str, Any]
    text: str
    at: str  # the line of source
    dtype: torch.dtype
    rank: int

    @property
    def operands(self) -> tuple[Any, ...]:
        return tuple(self.given.values())

    @property
    def is_truth(self) -> bool:
        return self.dtype == torch.bool and self.rank == 0


def symbols_of(value: Any) -> frozenset[str]:
    """Names of the symbols on which a term depends."""
    if isinstance(value, (tuple, list)):
        return frozenset().union(*map(symbols_of, value))
    if not isinstance(value, Term):
        return frozenset()
    return symbols_of(value.operands) if value.given else frozenset({value.name})


def is_by_places(value: Any) -> bool:
    """Whether a term can be computed for many places at once: it looks up, and goes on element by element."""
    if isinstance(value, (tuple, list)):
        return all(map(is_by_places, value))
    if isinstance(value, Tensor):
        return value.dim() == 0
    if not isinstance(value, Term) or not value.given or value.name == CONSTANT:
        return True
    operands = value.given["items"] if value.name == LOOK else value.operands
    return value.rank == 0 and value.name in (*_BY_ELEMENT, LOOK) and is_by_places(operands)


class Reading(TorchFunctionMode):
    """Notes what a function does with symbols."""

    def __init__(self, recorder: Recorder, what: str) -> None:
        super().__init__()
        self.recorder = recorder
        self.what = what  # the function that is read, as letters name it
        self._terms: dict[int, Term] = {}
        self._alive: list[Tensor] = []

    def read(self, function: Callable[..., Any], symbols: Mapping[str, torch.dtype]) -> Any:
        """The term that a function of these symbols returns, or a number or tensor that depends on none."""
        given = [self._symbol(name, dtype) for name, dtype in symbols.items()]
        try:
            with self:
                return self._meant(function(*given))
        except AutoparError:
            raise
        except Exception as e:  # whatever a user's function raises on symbols
            raise NotServed(f"{self.what} cannot be read: {type(e).__name__}: {e}", at=source()) from e

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not any(id(t) in self._terms for t in tensors_in(args, kwargs)):
            args, kwargs = pytree.tree_map_only(Tensor, self._stand_in, (args, kwargs))
            return function(*args, **kwargs)
        if function in READ_VALUES:
            raise self.letter(f"asks for the value of {self._text(args[0])}", source(), "torch functions alone")
        if function is Tensor.__getitem__:
            return self._looked_up(*args)
        result = self._on_fakes(lambda: function(*args, **kwargs))
        if not isinstance(result, Tensor):
            return result
        name, given = _op_of(function, args, kwargs, result)
        terms = {key: self._meant(value) for key, value in given.items()}
        if (same := _unchanged(name, terms)) is not None:
            self._terms[id(result)] = same
            self._alive.append(result)
            return result
        return self._note(result, name, terms, self._written(name, given))

    def letter(self, what: str, at: str, advice: str = HOW_TO_SAY) -> NotServed:
        """The letter that the function which is read does something."""
        return NotServed(f"{self.what} {what}", at=at, advice=advice)

    def key(self, value: Any, places: Mapping[str, str] | None = None) -> Any:
        """A hashable form of a term, equal for equal terms; `places` renames symbols."""
        if isinstance(value, Term):
            if not value.given:
                return (places or {}).get(value.name, value.name)
            return value.name, self.key(value.operands, places)
        if isinstance(value, (tuple, list)):
            return tuple(self.key(one, places) for one in value)
        return self.recorder.node(value) if isinstance(value, Tensor) else (type(value), repr(value))

    def _symbol(self, name: str, dtype: torch.dtype) -> Tensor:
        made = self._on_fakes(lambda: torch.zeros((), dtype=dtype))
        return self._note(made, name, {}, name)

    def _on_fakes(self, run: Callable[[], Any]) -> Any:
        """The result of a call on fakes, of which nothing is recorded."""
        call = self.recorder.call
        call.function = "a symbol"
        try:
            return run()
        finally:
            call.function = None

    def _note(self, tensor: Tensor, name: str, given: Mapping[str, Any], text: str) -> Tensor:
        self._terms[id(tensor)] = Term(name, given, text, source(), tensor.dtype, tensor.dim())
        self._alive.append(tensor)
        return tensor

    def _stand_in(self, tensor: Tensor) -> Tensor:
        """The tensor that stands for this one in the capture.

        A function that was made before it holds the module's own tensors; one from elsewhere is an error.
        """
        known = self.recorder.names.fake_of.get(id(tensor), tensor)
        if not self.recorder.knows(known):
            raise self.recorder.outsider(tensor)
        return known

    def _meant(self, value: Any) -> Any:
        """The term of a tensor, or else the tensor of the model that it is; any other value itself."""
        if not isinstance(value, Tensor):
            return value
        return self._terms.get(id(value)) or self._stand_in(value)

    def _looked_up(self, tensor: Tensor, index: Any) -> Tensor:
        """Note `tensor[b, q_idx]`: a symbol, or a number, for each of its first dims."""
        items = [self._meant(item) for item in (index if isinstance(index, tuple) else (index,))]
        of = self._meant(tensor)
        if isinstance(of, Term) and of.name == LOOK:
            items = [*of.given["items"], *items]
            of = of.given["of"]
        text = f"{self._name(of)}[{', '.join(map(_said, items))}]"
        is_plain = all(item.rank == 0 if isinstance(item, Term) else type(item) is int for item in items)
        if isinstance(of, Term) or not is_plain or len(items) > of.dim():
            raise self.letter(f"looks up {text}, which is not one number for each place", source())
        made = self._on_fakes(lambda: torch.empty(of.shape[len(items) :], dtype=of.dtype))
        return self._note(made, LOOK, {"of": of, "items": tuple(items)}, text)

    def _written(self, name: str, given: Mapping[str, Any]) -> str:
        """A call as text: an operator between its operands, or a function of them."""
        said = [self._text(value) for value in given.values()]
        if name in _OPERATORS and len(said) == 2:
            return f" {_OPERATORS[name][0]} ".join(f"({one})" if " " in one else one for one in said)
        return said[0] if name == CONSTANT else f"{name}({', '.join(said)})"

    def _text(self, value: Any) -> str:
        return _said(self._meant(value)) if id(value) in self._terms else self._name(value)

    def _name(self, value: Any) -> str:
        """The name of a tensor of the model; another value as it is written."""
        if isinstance(value, Term):
            return f"({value.text})"
        if not isinstance(value, Tensor):
            return repr(value)
        names = self.recorder.names.of.get(id(value))
        return names[0] if names else str(self.recorder.node(value).name)


def _said(value: Any) -> str:
    return value.text if isinstance(value, Term) else repr(value)


def _unchanged(name: str, given: Mapping[str, Any]) -> Term | None:
    """The term that a cast to its own dtype, or an addition of 0, gives back; None for others."""
    one, other = (*given.values(), None, None)[:2]
    if not isinstance(one, Term) or len(given) != 2:
        return None
    is_cast = name == "to" and other == one.dtype
    is_nothing = name in ("add", "sub") and type(other) is int and other == 0
    return one if is_cast or is_nothing else None


def _op_of(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> tuple[str, dict[str, Any]]:
    """The name of the op that a call means, and what it is given."""
    called = name_of(function)
    is_write = called in IN_PLACE_OPERATORS or (called.endswith("_") and not called.endswith("__"))
    op, given = functional(function, args, kwargs) if is_write else lookup(function, args, kwargs, result)
    name = op.name if op is not None else called
    if name in _REFLECTED:
        return _REFLECTED[name], {"input": given["_1"], "other": given["_0"]}
    if name in _CONSTANTS or name in ("full", "full_like"):
        return CONSTANT, {"value": _CONSTANTS.get(name, given.get("fill_value"))}
    if name == "div" and given.get("rounding_mode") == "floor":
        return "floor_divide", {"input": given["input"], "other": given["other"]}
    if name == "to":
        return name, {"input": given["input"], "dtype": result.dtype}
    return name, dict(given)


def on_places(value: Any, places: Mapping[str, Tensor]) -> Any:
    """Compute a term on tensors of places: `b` is [batch, 1], and a place [1, s]."""
    if isinstance(value, (tuple, list)):
        return tuple(on_places(one, places) for one in value)
    if not isinstance(value, Term):
        return value
    if not value.given:
        return places[value.name]
    if value.name == CONSTANT:
        return value.given["value"]
    if value.name == LOOK:
        return _rows_of(value, places)
    given = {name: on_places(one, places) for name, one in value.given.items()}
    if value.name in _OPERATORS and len(given) == 2:
        return _OPERATORS[value.name][1](*given.values())
    return OPS[value.name].run(given)


def _rows_of(look: Term, places: Mapping[str, Tensor]) -> Tensor:
    """The result of a look-up for all places: a part of the tensor where each dim has its symbol."""
    found: Tensor = look.given["of"]
    items: tuple[Any, ...] = look.given["items"]
    names = [item.name if isinstance(item, Term) and not item.given else "" for item in items]
    is_batched = names[:1] == ["b"]
    if not all(names) or names[is_batched:] not in ([], ["q_idx"], ["kv_idx"]):
        made: Tensor = found[on_places(items, places)]
        return made
    for dim, name in enumerate(names):
        length = places[name].numel()
        if found.shape[dim] < length:
            raise NotServed(
                f"{look.text} is looked up at {length} places, and has {found.shape[dim]}",
                at=look.at,
                advice="a number for each sequence of the batch, and for each place",
            )
        if found.shape[dim] > length:
            found = found.narrow(dim, 0, length)
    if not is_batched:
        return found.unsqueeze(0)
    return found.unsqueeze(1) if len(names) == 1 else found

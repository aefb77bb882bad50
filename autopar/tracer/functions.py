"""The function mode of a capture: sees every torch function before autograd, and passes it to its handler.

There are handlers for these kinds of functions:

    queries        answered by the fakes: no node
    ops            one node each, under autocast with their casts
    composites     Python functions of torch: their bodies are recorded instead
    respelled      functions that ask for values or draw inside: what they come to is recorded
    by mask        functions that choose by a mask: known masks say how many places there are
    refused        a letter
    writes         `writes.py`
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar.ops.entry import SPELLINGS
from autopar.runtime.brief_patches import OVERRIDE_CHECKS, without_override_checks
from autopar.runtime.private import ASSERTIONS, is_transform_active
from autopar.tracer import branches, chosen_ends, refused_calls
from autopar.tracer.call import name_of
from autopar.tracer.masks import BY_MASK, masked_select
from autopar.tracer.recorder import Recorder
from autopar.tracer.respelled import RESPELLED
from autopar.tracer.torch_functions import (
    IN_PLACE_OPERATORS,
    QUERIES,
    READ_VALUES,
    REFUSED,
    RESHAPED_IN_PLACE,
    SHAPED_BY_VALUES,
)
from autopar.tracer.writes import in_place, into, refuse_generator, turned

Handler = Callable[[Recorder, Any, tuple[Any, ...], dict[str, Any]], Any]


class FunctionMode(TorchFunctionMode):
    """The function mode of a recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        recorder.values.chosen.recording = functools.partial(type(self), recorder)

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args = plain(args)
        kwargs = plain(kwargs or {})
        call = self.recorder.call
        handler = handler_of(function)
        if call.function is None and handler is query and self.recorder.values.chosen.meets(args):
            return chosen_ends.size_of(self.recorder, function, args, kwargs)
        if call.function is not None or handler is query:
            return function(*args, **kwargs)
        if is_transform_active():  # Its tensors are wrapped; the ops inside are recorded below autograd.
            call.is_transformed = True
            try:
                return function(*args, **kwargs)
            finally:
                call.is_transformed = False
        return handler(self.recorder, function, args, kwargs)


def plain(value: Any) -> Any:
    """The value with Python numbers instead of numpy's: torch takes both, a graph holds only Python's."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (tuple, list):
        return type(value)(map(plain, value))
    if type(value) is dict:
        return {name: plain(v) for name, v in value.items()}
    if type(value) is slice:
        return slice(plain(value.start), plain(value.stop), plain(value.step))
    return value


def query(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle a query about a tensor's shape or dtype: no node."""
    return function(*args, **kwargs)


def refusing(what: str, advice: str) -> Handler:
    """A handler that raises a letter of these words."""

    def refuse(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise recorder.letter(f"{what} ({name_of(function)})", args, advice)

    return refuse


def answer_value(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle a question about a tensor's values."""
    if recorder.values.chosen.meets(args):
        chosen_ends.refuse_values(recorder, function, args[0])
    recorder.values.chosen.rounds.is_read |= function is not Tensor.__bool__
    return branches.answer(recorder, function, args[0])


def by_mask(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle a function whose result is as long as a mask has true elements."""
    spelled, is_asked = BY_MASK[function]
    if not is_asked(args, kwargs):
        return record_op(recorder, function, args, kwargs)

    chosen = args[0] if args else kwargs.get("input", kwargs.get("condition"))
    mask = chosen
    if spelled is masked_select:
        mask = args[1] if len(args) > 1 else kwargs["mask"]
    if not recorder.values.chosen.meets(chosen, mask) and branches.count(recorder, mask) is None:
        if spelled is masked_select:
            return chosen_ends.selected(recorder, chosen, mask)
        is_list = name_of(function) != "where" and not kwargs.get("as_tuple")
        find = chosen_ends.listed_places_of if is_list else chosen_ends.places_of
        return find(recorder, mask, name_of(function))

    def count(mask: Tensor) -> int:
        found = branches.count(recorder, mask)
        if found is None:
            raise refused_calls.depends_on_values(recorder, function, args)
        return found

    with FunctionMode(recorder):
        return spelled(count, *args, **kwargs)


def shown(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle printing of a tensor: allowed, except in a hook, which would print values."""
    if name_of(function) == "__format__" and (number := recorder.values.chosen.rounds.number_of(args[0])) is not None:
        recorder.values.chosen.rounds.is_read = True
        return format(number, *args[1:])
    if recorder.hooks.running:
        raise recorder.letter(
            f"a hook ({recorder.hooks.running[-1]}) shows a tensor, which has no values while a model is captured",
            args,
            "an output of the model, shown outside",
        )
    return function(*args, **kwargs)


def refuse_shape(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuse a function whose result has a shape that depends on values."""
    raise refused_calls.depends_on_values(recorder, function, args)


def record_attribute(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle an attribute of a tensor: x.shape, x.T, x.grad."""
    if recorder.values.chosen.meets(args):
        return chosen_ends.attribute(recorder, function, args, kwargs)
    result = recorder.execute(function, args, kwargs)
    if isinstance(result, Tensor):
        try:
            recorder.record(function, args, kwargs, result)
        except KeyError as e:
            raise recorder.letter(f"the tensor attribute {e} is not captured", args) from e
    return result


def record_op(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle a function that computes, under autocast with its casts, unless it has an out=."""
    refuse_generator(recorder, args, kwargs)
    if isinstance(kwargs.get("out"), Tensor):
        return into(recorder, function, args, kwargs)
    if recorder.values.chosen.meets(args, kwargs):
        return chosen_ends.call(recorder, function, args, kwargs)
    if recorder.casts.on():
        return recorder.casts.call(function, args, kwargs)
    return plain_op(recorder, function, args, kwargs)


def plain_op(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle a function that computes, as it stands."""
    result = recorder.execute(function, args, kwargs)
    recorder.record(function, args, kwargs, result)
    return result


def op_or_write(position: int) -> Handler:
    """A handler of functions whose argument at `position` may ask for a write, as relu(x, inplace=True)."""

    def call(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_write = kwargs.get("inplace", args[position] if len(args) > position else False)
        return (in_place if is_write else record_op)(recorder, function, args, kwargs)

    return call


def wants_gradient(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle x.requires_grad = True on a tensor made in forward, whose .grad nobody outside sees.

    On other tensors it is refused by a letter.
    """
    tensor = args[0]
    wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
    is_changed = tensor.requires_grad != wanted
    if is_changed and (not wanted or id(tensor) in recorder.names.of or recorder.node(tensor).op == "placeholder"):
        raise recorder.letter(
            "requires_grad of a tensor is changed inside the model", args, "setting it before tracing"
        )
    recorder.hooks.effects += is_changed
    return recorder.execute(function, args, kwargs)


def opened(function: types.FunctionType) -> Handler:
    """A handler for a composite: its body is recorded, with checks for overrides answered by no."""
    no_checks = dict.fromkeys(OVERRIDE_CHECKS, lambda *_: False)
    body = types.FunctionType(
        function.__code__,
        {**function.__globals__, **no_checks},
        name_of(function),
        function.__defaults__,
        function.__closure__,
    )
    body.__kwdefaults__ = function.__kwdefaults__
    asks_torch = "overrides" in function.__code__.co_names  # torch.nn.init asks torch.overrides itself

    def call(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        running = recorder.call.opened
        if function in running:  # A function that asks torch about its own call is not a composite.
            return plain_op(recorder, function, args, kwargs)
        running.append(function)
        try:
            with without_override_checks(asks_torch), FunctionMode(recorder):
                return body(*args, **kwargs)
        finally:
            running.pop()

    return call


def respelled(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle a function that reads values or draws inside: its respelled form is recorded instead."""
    spelled, is_asked = RESPELLED[function]
    if not is_asked(args, kwargs):
        return record_op(recorder, function, args, kwargs)
    with FunctionMode(recorder):
        return spelled(*args, **kwargs)


def looked_up(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle x[i, 0, j]: integers and scalar tensors select before other tensors index."""
    tensor = args[0]
    if recorder.values.chosen.of(tensor) is not None:
        return chosen_ends.call(recorder, function, args, kwargs)
    items = _with_places(recorder, _items(recorder, args[0], args[1]))
    if not _choose_first(items):
        if chosen_ends.is_met(recorder, items):
            return chosen_ends.look(recorder, tensor, items)
        return record_op(recorder, function, (tensor, _as_index(items, args[1])), kwargs)
    row, kept = _chosen(recorder, tensor, items)
    if not kept:
        return row
    with FunctionMode(recorder):
        return row[tuple(kept)]


def assigned(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Handle x[i, 0, j] = v, a write to the row that x[i, 0] shows."""
    tensor = args[0]
    if recorder.values.chosen.of(tensor) is not None:
        chosen_ends.write(recorder, function, args, kwargs)
        return
    items = _items(recorder, args[0], args[1])
    value = args[2]
    if isinstance(value, Tensor) and value.dim() > tensor.dim() - sum(map(_dims_of, items)):  # a value for each place
        items = _with_places(recorder, items)
    if not _choose_first(items):
        in_place(recorder, function, (tensor, _as_index(items, args[1]), value), kwargs)
        return
    row, kept = _chosen(recorder, tensor, items)
    with FunctionMode(recorder):
        row[tuple(kept)] = value


def _items(recorder: Recorder, tensor: Tensor, index: Any) -> list[Any]:
    """The items of an index, with lists for arrays of numpy and numbers of places for their masks."""
    items = [_listed(recorder, item) for item in (index if isinstance(index, tuple) else (index,))]
    found: list[Any] = []
    for k, item in enumerate(items):
        if not isinstance(item, np.ndarray):
            found.append(item)
            continue
        is_behind = Ellipsis in map(_plain, items[:k])
        first = tensor.dim() - sum(map(_dims_of, items[k:])) if is_behind else sum(map(_dims_of, items[:k]))
        if (there := tuple(tensor.shape[first : first + item.ndim])) != item.shape:
            said = f"the shape of the mask {item.shape} does not match that of the indexed dims {there}"
            raise recorder.letter(said, (tensor,), "a mask of that shape")
        found += [places.tolist() for places in item.nonzero()]
    return found


def _with_places(recorder: Recorder, items: list[Any]) -> list[Any]:
    """The items of an index, with the places of known masks in their stead."""
    found: list[Any] = []
    for item in items:
        is_mask = isinstance(item, Tensor) and item.dtype == torch.bool and item.dim()
        count = branches.count(recorder, item) if is_mask else None
        if count is None:
            found.append(item)
            continue
        with FunctionMode(recorder):
            found += torch.nonzero_static(item, size=count).unbind(1)
    return found


def _listed(recorder: Recorder, item: Any) -> Any:
    """Masks outside of torch as arrays, other arrays as lists, and the number of a round as a number."""
    if (number := recorder.values.chosen.rounds.number_of(item)) is not None and item.dim() < 2:
        return slice(number, number + 1) if item.dim() else number
    if isinstance(item, np.ndarray) and item.dtype != bool:
        return item.tolist()
    is_mask = isinstance(item, list) and all(isinstance(one, bool) for one in pytree.tree_leaves(item))
    return np.asarray(item) if is_mask and item else item


def _as_index(items: list[Any], given: Any) -> Any:
    """The items as an index: as they were given where nothing was spelled otherwise."""
    if isinstance(given, tuple):
        is_same = len(items) == len(given) and all(one is other for one, other in zip(items, given, strict=True))
        return given if is_same else tuple(items)
    return items[0] if len(items) == 1 else tuple(items)


def _choose_first(items: Sequence[Any]) -> bool:
    """Whether an index has a scalar integer tensor, or an integer beside a tensor."""
    has_tensors = any(isinstance(item, Tensor) for item in items)
    return any(map(_is_one_number, items)) or (has_tensors and any(map(_is_int, items)))


def _chosen(recorder: Recorder, tensor: Tensor, items: Sequence[Any]) -> tuple[Tensor, list[Any]]:
    """The part of a tensor that integers select, on its memory as in eager, and the remaining items.

    torch would read the value of a scalar tensor; here it looks up a row.
    """
    kept: list[Any] = []
    for k, item in enumerate(items):
        is_behind = Ellipsis in map(_plain, kept)
        dim = tensor.dim() - sum(map(_dims_of, items[k:])) if is_behind else sum(map(_dims_of, kept))
        if _is_one_number(item):
            with FunctionMode(recorder):
                place = item.clone()  # nobody writes to it: the row stays where it is
            row = recorder.execute(Tensor.select, (tensor, dim, 0), {})
            recorder.record(Tensor.__getitem__, (tensor, (*[slice(None)] * dim, place)), {}, row)
            recorder.values.looked_up[id(row)] = recorder.node(item), dim
            tensor = row
        elif _is_int(item):
            with FunctionMode(recorder):
                tensor = tensor.select(dim, item)
        else:
            kept.append(item)
    return tensor, kept


def _plain(item: Any) -> Any:
    """An item of an index, with None for tensors and arrays, which would compare by their values."""
    return None if isinstance(item, (Tensor, np.ndarray)) else item


def _is_int(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _is_one_number(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dim() == 0 and not item.is_floating_point() and item.dtype != torch.bool


def _dims_of(item: Any) -> int:
    """Number of dims of a tensor that an item of an index consumes."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    if isinstance(item, np.ndarray):
        return item.ndim
    return item.dim() if isinstance(item, Tensor) and item.dtype == torch.bool else 1


def assertion(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Handle an assertion: one about values is dropped, one about shapes is checked now."""
    if not isinstance(args[0], Tensor):
        assert args[0], args[1] if len(args) > 1 else kwargs.get("message", "")


HANDLERS: dict[Any, Handler] = {
    **dict.fromkeys(QUERIES, query),
    **{function: refusing(what, advice) for function, (what, advice) in REFUSED.items()},
    **dict.fromkeys(READ_VALUES, answer_value),
    **dict.fromkeys(SHAPED_BY_VALUES, refuse_shape),
    **dict.fromkeys(RESHAPED_IN_PLACE, turned),
    **dict.fromkeys(RESPELLED, respelled),
    **dict.fromkeys(BY_MASK, by_mask),
    **dict.fromkeys(ASSERTIONS, assertion),
    Tensor.__getitem__: looked_up,
    Tensor.__setitem__: assigned,
    **dict.fromkeys((Tensor.__repr__, Tensor.__format__), shown),
    **dict.fromkeys((Tensor.requires_grad_, Tensor.requires_grad.__set__), wants_gradient),
}


@functools.cache
def handler_of(function: Any) -> Handler:
    """The handler of a torch function."""
    return HANDLERS.get(function) or _by_form(function)


def _by_form(function: Any) -> Handler:
    """The handler for a function that has none of its own, by its name and code."""
    name = name_of(function)
    if name == "__get__":
        return record_attribute
    if name == "__set__" and function.__self__.__name__ == "_backward_hooks":  # autograd clears them after a write
        return query
    if name == "__set__":
        return refusing(f"the attribute {function.__self__.__name__} of a tensor is set", "")
    if isinstance(function, types.FunctionType):
        code = function.__code__
        if function not in SPELLINGS and any(check in code.co_names for check in OVERRIDE_CHECKS):
            return opened(function)
    if name in IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__")):
        return in_place
    if isinstance(function, types.FunctionType):
        parameters = list(code.co_varnames[: code.co_argcount])
        if "inplace" in parameters:
            return op_or_write(parameters.index("inplace"))
    return record_op

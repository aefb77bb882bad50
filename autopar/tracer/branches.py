"""Questions about values: computed where the graph proves the answer, answered where a declared assumption does,
refused otherwise.

    proved       the value depends on no input, parameter or draw:  (packed_mask[:, -1] == 0).all() of positions from
                 arange
                 a uniform draw is compared with a bound that it cannot cross:  torch.rand([]) < 0.0
    no_padding   attention masks among the inputs are all ones
    finite       isfinite is true everywhere; isinf and isnan are false
    branches     the caller names the line and the answer

Every answer is a line of `graph.assumptions`.
"""

from __future__ import annotations

import operator
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.distributions import constraints, distribution

from autopar.graph.graph import Assume, info, op_name, run, type_of
from autopar.runtime.private import clean_room

if TYPE_CHECKING:
    from autopar.tracer.recorder import Recorder

LARGEST = 1 << 26  # elements of a tensor that is computed to answer a question
_DRAWS = ("rand", "rand_like")
_COMPARED = {"lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge}
_FINITE = {"isfinite": True, "isinf": False, "isnan": False}


class Unknown(Exception):
    """The value depends on what is not known while tracing."""


def answer(recorder: Recorder, function: Any, tensor: Tensor) -> Any:
    """What `function` (bool, item, tolist, ...) says of this tensor."""
    node, line = recorder.node(tensor), recorder.source()
    is_question = function is Tensor.__bool__
    if is_question and _asks_a_distribution():
        recorder.assumed("what torch.distributions is given is valid: its checks of values are not made")
        return True
    for where, declared in recorder.assume.branches if is_question else ():
        if line.startswith(where + ","):
            recorder.asked.add(where)
            recorder.assumed(f"a condition is {declared}, as declared")
            return declared
    by: set[str] = set()
    try:
        value = _of_a_draw(node)
        if value is not None:
            by.add("whatever is drawn")
        else:
            try:  # what is known needs no assumption
                value = _compute(recorder, node, by, function, Assume())
            except Unknown:
                if recorder.assume == Assume():
                    raise
                value = _compute(recorder, node, by, function, recorder.assume)
    except Unknown as e:
        name = function.__name__.strip("_")
        raise recorder.letter(
            f"the model asks for the value of a tensor ({name}), which a graph cannot hold: it depends on {e}",
            (tensor,),
            f'torch.where, or Assume(branches={{"{line.split(",")[0]}": True}})'
            if is_question
            else "a tensor instead of its value",
        ) from None
    recorder.assumed(
        f"a {'condition' if is_question else 'value'} is {value}: "
        f"{' and '.join(sorted(by)) or 'it depends on no input'}"
    )
    return value


def _asks_a_distribution() -> bool:
    """Does torch.distributions ask whether all values that it was given are valid?"""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):  # ours
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_code.co_filename in _CHECKS


_HERE = str(Path(__file__).parent.parent)
_CHECKS = frozenset({distribution.__file__, constraints.__file__})


def _of_a_draw(node: fx.Node) -> bool | None:
    """A comparison of a draw from [0, 1) with a number that settles it."""
    while (
        op_name(node) in ("view", "to", "all", "any")
        and type_of(node.kwargs["input"]).nbytes
        and (op_name(node) != "to" or type_of(node).dtype == "bool")
    ):
        node = node.kwargs["input"]
    compare = _COMPARED.get(op_name(node))
    bound = node.kwargs.get("other")
    if compare is None or op_name(node.kwargs["input"]) not in _DRAWS or isinstance(bound, fx.Node):
        return None
    at_zero, near_one = compare(0.0, bound), compare(1.0 - 2**-53, bound)
    return at_zero if at_zero == near_one else None


def _compute(recorder: Recorder, node: fx.Node, by: set[str], function: Any, assume: Assume) -> Any:
    """What `function` says of a node's value, from what is known; `by` collects the assumptions it took."""
    env: dict[fx.Node, Any] = {}
    order: list[fx.Node] = []

    def visit(root: fx.Node) -> None:
        pending = [root]
        while pending:
            at = pending[-1]
            if at in env or at in seen:
                pending.pop()
                if at not in env and at not in placed:
                    placed.add(at)
                    order.append(at)
                continue
            seen.add(at)
            known = _known(assume, at, by)
            if known is not None:
                env[at] = known
            else:
                pending += at.all_input_nodes

    seen: set[fx.Node] = set()
    placed: set[fx.Node] = set()
    with clean_room(), torch._C.DisableTorchFunction(), torch.no_grad():
        visit(node)
        for at in order:
            env[at] = run(at, env)
        return function(env[node])


def _known(assume: Assume, node: fx.Node, by: set[str]) -> Tensor | None:
    """The value of a node that an assumption fixes; None: compute it from its operands."""
    about, type_ = info(node), type_of(node)
    if type_.nbytes > LARGEST * 8:
        raise Unknown(f"a tensor too large to compute while tracing ({type_})")
    if about.kind == "input":
        if assume.no_padding and len(type_.shape) == 2 and about.key.endswith(("attention_mask", "padding_mask")):
            by.add("no padding (declared)")
            return torch.full(
                type_.shape, about.key.endswith("attention_mask"), dtype=type_.torch_dtype
            )  # in a padding mask, true is padding
        raise Unknown(f"the input {about.key}")
    if about.kind in ("parameter", "buffer"):
        raise Unknown(f"the {about.kind} {about.key}")
    if op_name(node) in _FINITE and assume.finite:
        by.add("values are finite (declared)")
        return torch.full(type_.shape, _FINITE[op_name(node)])
    if about.random >= 0:
        raise Unknown("random numbers")
    return None

"""Answer questions about values in a capture: by proof where possible, by a declared assumption, else by a letter.

    proved       the value depends on no input, parameter or draw:  (packed_mask[:, -1] == 0).all() of positions from
                 arange
                 a uniform draw is compared with a bound that it cannot cross:  torch.rand([]) < 0.0
    no_padding   attention masks among the inputs are all ones
    finite       isfinite is true everywhere; isinf and isnan are false
    branches     the caller names the line and the answer
    checks       every other answer ends in an error: if (labels >= n).any(): raise ValueError

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

from autopar.graph import walks
from autopar.graph.graph import Assume, info, op_name, run, type_of
from autopar.runtime.private import clean_room, without_torch_functions
from autopar.tracer.call import name_of
from autopar.tracer.checks import answer_that_goes_on
from autopar.tracer.place import source

if TYPE_CHECKING:
    from autopar.tracer.recorder import Recorder

LARGEST = 1 << 26  # elements of a tensor that is computed to answer a question
_DRAWS = ("rand", "rand_like")
_COMPARED = {"lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge}
_BY_SHAPE = ("ones_like", "zeros_like", "full_like")
_FINITE = {"isfinite": True, "isinf": False, "isnan": False}


class Unknown(Exception):
    """Raised where a value depends on something that is not known while tracing."""


def answer(recorder: Recorder, function: Any, tensor: Tensor) -> Any:
    """The value of `function` (bool, item, tolist, ...) for this tensor; raises a letter if unknown."""
    node = recorder.node(tensor)
    line = source()
    is_question = function is Tensor.__bool__
    if (checks := _who_checks(is_question)) is not None:
        recorder.assumptions.add(f"what {checks} is given is valid: its checks of values are not made")
        return True
    declared = recorder.assumptions.branch(line) if is_question else None
    if declared is not None:
        recorder.assumptions.add(f"a condition is {declared}, as declared")
        return declared
    by: set[str] = set()
    try:
        value = _proved(node, by, function, recorder.assumptions.declared)
    except Unknown as e:
        if is_question and (goes_on := answer_that_goes_on()) is not None:
            recorder.assumptions.add(f"a check finds nothing wrong, and is not made: its condition is {goes_on}")
            return goes_on
        what = f"the model asks for the value of a tensor ({name_of(function).strip('_')}), which a graph cannot hold"
        advice = "a tensor instead of its value"
        if is_question:
            advice = f'torch.where, or Assume(branches={{"{line.split(",")[0]}": True}})'
        raise recorder.letter(f"{what}: it depends on {e}", (tensor,), advice) from None
    kind = "condition" if is_question else "value"
    recorder.assumptions.add(f"a {kind} is {value}: {' and '.join(sorted(by)) or 'it depends on no input'}")
    return value


def count(recorder: Recorder, mask: Tensor) -> int | None:
    """The number of true elements of a mask that is known while tracing; None for others."""
    try:
        found: int = _compute(recorder.node(mask), set(), lambda known: int(known.count_nonzero()), Assume())
    except Unknown:
        return None
    recorder.assumptions.add(f"a mask has {found} true elements: it depends on no input")
    return found


def is_known(recorder: Recorder, tensor: Tensor) -> bool:
    """Whether the values of a tensor are known while tracing, by proof or by what is declared."""
    try:
        _compute(recorder.node(tensor), set(), lambda _: True, recorder.assumptions.declared)
    except Unknown:
        return False
    return True


def _proved(node: fx.Node, by: set[str], function: Any, declared: Assume) -> Any:
    """The value, without assumptions where possible; `by` collects the reasons."""
    value = _of_a_draw(node)
    if value is not None:
        by.add("whatever is drawn")
        return value
    try:  # Known values need no assumption.
        return _compute(node, by, function, Assume())
    except Unknown:
        if declared == Assume():
            raise
        return _compute(node, by, function, declared)


def _who_checks(is_question: bool) -> str | None:
    """The part of torch that asks whether what it was given is valid, if one does."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):  # ours
        frame = frame.f_back
    if frame is None:
        return None
    if is_question and frame.f_code.co_filename in _DISTRIBUTIONS:
        return "torch.distributions"
    is_check = frame.f_code.co_filename == torch.__file__ and frame.f_code.co_name == "_check_tensor_all_with"
    return "torch._check_tensor_all" if is_check else None


_HERE = str(Path(__file__).parent.parent)
_DISTRIBUTIONS = frozenset({distribution.__file__, constraints.__file__})


def _of_a_draw(node: fx.Node) -> bool | None:
    """Result of comparing a draw from [0, 1) with a number, where every draw gives the same; else None."""
    compared = walks.origin(node, _keeps_truth)
    compare = _COMPARED.get(op_name(compared))
    bound = compared.kwargs.get("other")
    if compare is None or op_name(compared.kwargs["input"]) not in _DRAWS or isinstance(bound, fx.Node):
        return None
    at_zero = compare(0.0, bound)
    near_one = compare(1.0 - 2**-53, bound)
    return at_zero if at_zero == near_one else None


def _keeps_truth(node: fx.Node) -> bool:
    """Whether the op's result is all true where its operand is, and all false where its operand is."""
    name = op_name(node)
    if name == "to" and type_of(node).dtype != "bool":
        return False
    return name in ("view", "to", "all", "any") and bool(type_of(node.kwargs["input"]).nbytes)


def _compute(node: fx.Node, by: set[str], function: Any, assume: Assume) -> Any:
    """The value of a node from what is known; `by` collects the assumptions that it took."""
    env: dict[fx.Node, Any] = {}

    def is_known(at: fx.Node) -> bool:
        known = env.get(at)
        if known is None:
            known = _by_shape(at) if op_name(at) in _BY_SHAPE else _known(assume, at, by)
            if known is not None:
                env[at] = known
        return known is not None

    with clean_room(), without_torch_functions(), torch.no_grad():
        for at in sorted(walks.ancestors([node], is_known)):  # nodes compare by their place
            env[at] = run(at, env)
        return function(env[node])


def _by_shape(node: fx.Node) -> Tensor:
    """The value of an op that looks at nothing of its operand but the shape and the dtype."""
    given = node.kwargs["input"]
    type_ = type_of(given)
    if max(type_.nbytes, type_of(node).nbytes) > LARGEST * 8:
        raise Unknown(f"a tensor too large to compute while tracing ({type_})")
    found: Tensor = run(node, {given: torch.empty(type_.shape, dtype=type_.torch_dtype)})
    return found


def _known(assume: Assume, node: fx.Node, by: set[str]) -> Tensor | None:
    """The value of a node that an assumption fixes; None where it must be computed from its operands."""
    about = info(node)
    type_ = type_of(node)
    if type_.nbytes > LARGEST * 8:
        raise Unknown(f"a tensor too large to compute while tracing ({type_})")
    if about.kind == "input":
        if assume.no_padding and len(type_.shape) == 2 and about.key.endswith(("attention_mask", "padding_mask")):
            by.add("no padding (declared)")
            # An attention mask is true where a token counts, a padding mask where it does not.
            is_true = about.key.endswith("attention_mask")
            return torch.full(type_.shape, is_true, dtype=type_.torch_dtype)
        raise Unknown(f"the input {about.key}")
    if about.kind in ("parameter", "buffer"):
        raise Unknown(f"the {about.kind} {about.key}")
    if op_name(node) in _FINITE and assume.finite:
        by.add("values are finite (declared)")
        return torch.full(type_.shape, _FINITE[op_name(node)])
    if about.random >= 0:
        raise Unknown("random numbers")
    return None

"""Call emitted ops by torch's Python bindings, which cost the host less time than calls by overload.

A binding picks the overload by its arguments. The tables hold only ops for which that is sure to be the same overload.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from autopar.runtime.private import TO_COPY

_ATEN = torch.ops.aten
_LAYER = _ATEN.mkldnn_rnn_layer.default
# methods of the first operand, which is a tensor
_METHODS: dict[Any, str] = {
    _ATEN.reshape.default: "reshape",
    _ATEN.t.default: "t",
    _ATEN.transpose.int: "transpose",
    _ATEN.permute.default: "permute",
    _ATEN.expand.default: "expand",
    _ATEN.unsqueeze.default: "unsqueeze",
    _ATEN.squeeze.dim: "squeeze",
    _ATEN.select.int: "select",
    _ATEN.split_with_sizes.default: "split_with_sizes",
    _ATEN.clone.default: "clone",
    _ATEN.add.Tensor: "add",
    _ATEN.add_.Tensor: "add_",
    _ATEN.sub.Tensor: "sub",
    _ATEN.mul.Tensor: "mul",
    _ATEN.div.Tensor: "div",
    _ATEN.neg.default: "neg",
    _ATEN.exp.default: "exp",
    _ATEN.log.default: "log",
    _ATEN.tanh.default: "tanh",
    _ATEN.rsqrt.default: "rsqrt",
    _ATEN.sigmoid.default: "sigmoid",
    _ATEN.relu.default: "relu",
    _ATEN.pow.Tensor_Scalar: "pow",
    _ATEN.sum.default: "sum",
    _ATEN.sum.dim_IntList: "sum",
    _ATEN.mean.dim: "mean",
    _ATEN.mm.default: "mm",
    _ATEN.bmm.default: "bmm",
}
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    _ATEN.addmm.default: torch.addmm,
    _ATEN.cat.default: torch.cat,
    _ATEN.embedding.default: torch.embedding,
    _ATEN.convolution.default: torch.convolution,
    _ATEN.native_layer_norm.default: torch.native_layer_norm,
    _ATEN.where.self: torch.where,
}


def _recurrent_layer(*args: Any) -> tuple[Tensor | None, ...]:
    """Run an LSTM layer on CPU with gradients on, so that torch returns what its backward reads."""
    detached = [x.detach() if isinstance(x, Tensor) else x for x in args]
    with torch.enable_grad():
        made: tuple[Tensor | None, ...] = _LAYER(*detached)
    return made


def keep_for_backward(graph: fx.Graph) -> None:
    """Call recurrent layers with gradients on, so that they return the workspace of their backward.

    before    y, h, c, space = aten.mkldnn_rnn_layer.default(x, ...)
    after     y, h, c, space = _recurrent_layer(x, ...)
    """
    for node in graph.find_nodes(op="call_function", target=_LAYER):
        node.target = _recurrent_layer


def by_bindings(graph: fx.Graph) -> None:
    """Replace calls of ATen overloads by methods of tensors and functions of torch.

    before    t = aten.t.default(w);  y = aten.addmm.default(b, x, t);  c = aten._to_copy.default(y, dtype=bfloat16)
    after     t = w.t();  y = torch.addmm(b, x, t);  c = y.to(dtype=bfloat16, copy=True)
    """
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in _FUNCTIONS:
            node.target = _FUNCTIONS[node.target]
        elif node.target is TO_COPY and set(node.kwargs) <= {"dtype", "memory_format"}:
            node.op = "call_method"
            node.target = "to"
            node.kwargs = {**node.kwargs, "copy": True}
        elif node.target in _METHODS and isinstance(node.args[0], fx.Node):
            node.op = "call_method"
            node.target = _METHODS[node.target]

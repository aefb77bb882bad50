"""Experts of transformers as one op, whatever implementation is set on a model.

Its interface is answered while a module is captured: its implementations sort rows of all experts, or loop over those
that were hit, and neither can be divided.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from autopar.letters import NotServed
from autopar.ops.experts import experts

_GetInterface = Callable[..., Callable[..., Tensor]]


def experts_of_transformers(original: _GetInterface) -> _GetInterface:
    """A replacement of `ExpertsInterface.get_interface`."""

    def get_interface(interface: Any, implementation: str, default: Callable[..., Tensor]) -> Callable[..., Tensor]:
        implemented = original(interface, implementation, default)

        def forward(module: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            if module._is_expert_parallel or module.has_post_expert_norm:
                return implemented(module, hidden, ids, weights)
            return _experts(module, hidden, ids, weights)

        return forward

    return get_interface


def _experts(module: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    up = module.gate_up_proj if module.has_gate else module.up_proj
    biases: tuple[Any, Any] = (None, None)
    if module.has_bias:
        biases = (module.gate_up_proj_bias if module.has_gate else module.up_proj_bias), module.down_proj_bias
    layout = ("halves" if module.is_concatenated else "pairs") if module.has_gate else False
    try:
        return experts(
            hidden,
            ids,
            weights,
            up,
            module.down_proj,
            *biases,
            body=module._apply_gate if module.has_gate else module.act_fn,
            gated=layout,
            transposed=module.is_transposed,
        )
    except NotServed as e:
        raise NotServed(e.what, at=type(module).__name__, seen=e.seen, advice=e.advice) from e

"""Experts of transformers as one op, whatever implementation is set on a model.

Its interface is answered while a module is captured: its implementations sort rows of all experts, or loop over those
that were hit, and neither can be divided. Where the op does not serve what experts compute, the implementation that is
set runs, and the graph says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from autopar.letters import NotServed
from autopar.ops.experts import experts

_GetInterface = Callable[..., Callable[..., Tensor]]


def experts_of_transformers(original: _GetInterface, lines: list[str]) -> _GetInterface:
    """A replacement of `ExpertsInterface.get_interface`; `lines` go to what a graph assumes."""

    def get_interface(interface: Any, implementation: str, default: Callable[..., Tensor]) -> Callable[..., Tensor]:
        implemented = original(interface, implementation, default)

        def forward(module: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            if module._is_expert_parallel:
                raise NotServed(
                    f"transformers divides {type(module).__name__} itself, for a group of processes of its own",
                    advice="the model without its expert parallelism: the plan divides experts",
                )
            try:
                return _experts(module, hidden, ids, weights)
            except NotServed as e:
                name = type(module).__name__
                lines.append(f"{name} runs as transformers writes it, not as one op that plans divide: {e.what}")
                return implemented(module, hidden, ids, weights)

        return forward

    return get_interface


def _experts(module: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    up = module.gate_up_proj if module.has_gate else module.up_proj
    biases: tuple[Any, Any] = (None, None)
    if module.has_bias:
        biases = (module.gate_up_proj_bias if module.has_gate else module.up_proj_bias), module.down_proj_bias
    layout = ("halves" if module.is_concatenated else "pairs") if module.has_gate else False
    return experts(
        hidden,
        ids,
        weights,
        up,
        module.down_proj,
        *biases,
        body=module._apply_gate if module.has_gate else module.act_fn,
        gated=layout,
        behind=module.post_expert_norm if module.has_post_expert_norm else None,
        transposed=module.is_transposed,
    )

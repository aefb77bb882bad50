"""`Workload`: what a step computes whatever plan it follows, and `Rates`: how fast a plan computes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Workload:
    """The model, the batch of one optimizer step and its FLOPs, and the peak of the devices that compute it.

    `flops` are those of the model's products, forward and backward, without anything that is recomputed. Attention
    counts every pair of a query and a key, as torchtitan, nanoGPT and llm-foundry count it; in `causal_flops` causal
    attention counts half of them, as Megatron-LM does.
    """

    model: str = ""  # class of the model
    parameters: int = 0  # elements, each once
    inputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # shapes of the inputs of one call
    # Rows and tokens are those of all calls of a step. A model that looks nothing up by position has no tokens.
    rows: int = 0
    tokens: int = 0
    flops: float = 0.0
    causal_flops: float = 0.0
    dtype: str = ""  # dtype of most FLOPs
    device: str = ""
    # The device's peak in that dtype, by its data sheet, and its memory.
    peak_flops_per_s: float = 0.0
    memory_bytes: int = 0


class Rates(NamedTuple):
    """What a step of so many seconds on so many devices reaches.

    `mfu` is the share of the devices' peak that the model's own FLOPs take, `causal_mfu` the same of causal FLOPs.
    """

    step_s: float
    rows_per_s: float
    tokens_per_s: float  # 0 where the model has no tokens
    tokens_per_s_device: float
    flops_per_s_device: float
    mfu: float
    causal_mfu: float

    @staticmethod
    def of(workload: Workload, devices: int, step_s: float) -> Rates:
        if not step_s:
            return Rates(step_s, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        peak = workload.peak_flops_per_s * devices * step_s
        return Rates(
            step_s,
            workload.rows / step_s,
            workload.tokens / step_s,
            workload.tokens / step_s / devices,
            workload.flops / step_s / devices,
            workload.flops / peak if peak else 0.0,
            workload.causal_flops / peak if peak else 0.0,
        )

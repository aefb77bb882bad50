"""`StepWork`: what a step computes whatever plan it follows, and `StepRates`: how fast a plan computes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StepWork:
    """The model, the batch of one optimizer step and its FLOPs, and the peak of the devices that compute it.

    `flops` are those of the model's products, forward and backward, without anything that is recomputed. Attention
    counts every pair of a query and a key, as torchtitan, nanoGPT and llm-foundry count it; in `causal_flops` causal
    attention counts half of them, as Megatron-LM does. Of windows and documents both count only what is seen, the first
    as if it were seen in both directions.
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


@dataclass(frozen=True, slots=True)
class StepRates:
    """What a step of so many seconds on so many devices reaches."""

    workload: StepWork
    devices: int
    step_s: float

    @property
    def unit(self) -> str:
        """The word for what is counted: "tokens", or "rows" of a model that has no tokens."""
        return "tokens" if self.workload.tokens else "rows"

    @property
    def amount(self) -> int:
        """The tokens of a step, or its rows."""
        return self.workload.tokens or self.workload.rows

    @property
    def per_s(self) -> float:
        """Tokens or rows a second, of all devices."""
        return self._per_s(self.amount)

    @property
    def per_s_device(self) -> float:
        """Tokens or rows a second of one device."""
        return self.per_s / self.devices

    @property
    def rows_per_s(self) -> float:
        return self._per_s(self.workload.rows)

    @property
    def flops_per_s_device(self) -> float:
        """FLOPs a second of one device, of the model's own products."""
        return self._per_s(self.workload.flops) / self.devices

    @property
    def mfu(self) -> float:
        """The share of the devices' peak that the model's own FLOPs take; 0 without a known peak."""
        return self._of_peak(self.workload.flops)

    @property
    def causal_mfu(self) -> float:
        """The same of FLOPs of which causal attention counts half of its pairs."""
        return self._of_peak(self.workload.causal_flops)

    def _per_s(self, amount: float) -> float:
        return amount / self.step_s if self.step_s else 0.0

    def _of_peak(self, flops: float) -> float:
        peak = self.workload.peak_flops_per_s * self.devices
        return self._per_s(flops) / peak if peak else 0.0

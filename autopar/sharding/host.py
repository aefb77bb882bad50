"""`Host`: the memory of a node beside its devices, and how fast each device reaches it, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Host:
    """The host of a node: its memory, and the link of each of its devices while all devices use theirs."""

    name: str
    down_bytes_per_s: float  # a device to pinned memory
    up_bytes_per_s: float  # back to the device
    latency_s: float  # seconds of the smallest copy
    bytes: int  # memory of a node
    both_bytes_per_s: float = 0.0  # both ways together, at once; 0: nobody measured it
    adamw_params_per_s: float = 0.0  # parameters that a device's share of the CPU steps; 0: nobody measured it

    def __post_init__(self) -> None:
        for name in ("down_bytes_per_s", "up_bytes_per_s", "bytes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: {getattr(self, name)!r}, where a host has some")
        if self.latency_s < 0:
            raise ValueError(f"latency_s: {self.latency_s!r}, where time goes forward")

    def down_s(self, nbytes: float) -> float:
        """Seconds of a copy from a device to the host."""
        return self.latency_s + nbytes / self.down_bytes_per_s

    def up_s(self, nbytes: float) -> float:
        """Seconds of a copy from the host to a device."""
        return self.latency_s + nbytes / self.up_bytes_per_s

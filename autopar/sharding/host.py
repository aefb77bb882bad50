"""`Host`: the memory of a node beside its devices, and how fast each device reaches it, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

Bytes = TypeVar("Bytes", float, np.ndarray)


@dataclass(frozen=True, slots=True)
class Host:
    """The host of a node: its memory, and the link of each of its devices while all devices use theirs."""

    name: str
    down_bytes_per_s: float  # bytes that a device sends to pinned memory
    up_bytes_per_s: float  # bytes that it gets back
    latency_s: float  # seconds of the smallest copy
    bytes: int  # memory of a node
    both_bytes_per_s: float = 0.0  # both ways together, at once; 0: nobody measured it
    adamw_params_per_s: float = 0.0  # parameters that a device's share of the CPU steps; 0: nobody measured it

    def __post_init__(self) -> None:
        for name in ("down_bytes_per_s", "up_bytes_per_s", "bytes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: {getattr(self, name)!r}, where a host has some")
        for name in ("latency_s", "both_bytes_per_s", "adamw_params_per_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: {getattr(self, name)!r} is not a number from 0")

    def __str__(self) -> str:
        gigabytes = f"{self.down_bytes_per_s / 1e9:.4g} GB/s down, {self.up_bytes_per_s / 1e9:.4g} up a device"
        return f"{self.name}: {gigabytes}, {self.bytes / 2**30:.5g} GiB a node"

    def down_s(self, nbytes: Bytes) -> Bytes:
        """Seconds of a copy from a device to the host."""
        return self.latency_s + nbytes / self.down_bytes_per_s

    def up_s(self, nbytes: Bytes) -> Bytes:
        """Seconds of a copy from the host to a device."""
        return self.latency_s + nbytes / self.up_bytes_per_s

    def adamw_s(self, itemsize: int, nbytes: np.ndarray) -> np.ndarray:
        """Seconds of AdamW's step on the CPUs for `nbytes` bytes of a parameter, one behind the other.

        Its gradient goes down, with its values where it is in single precision, and the new values come up, all while
        the CPUs step others.
        """
        moves = 1 if itemsize < 4 else 2
        on_link = np.maximum(moves * nbytes / self.down_bytes_per_s, nbytes / self.up_bytes_per_s)
        return 2 * self.latency_s + np.maximum(nbytes / itemsize / self.adamw_params_per_s, on_link)

    def of_share(self, share: float) -> Host:
        """The host of so large a share of the node's devices, which has that share of its memory."""
        return replace(self, bytes=max(1, round(share * self.bytes)))

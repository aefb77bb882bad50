"""Copies of values that wait for backward: to the memory of the host, and back.

    begin_to_host      the copy begins
    end_to_host        the value on the host; the device's memory may be used again
    begin_from_host    the copy back begins, into new memory of the device
    end_from_host      the value on the device, laid out as it was

On a GPU each direction has a stream of its own, and the host waits for none of them: the compute stream waits for the
event of a copy where the copy ends, and a copy waits for the events of those that used its buffer before. A tensor that
is copied is kept by its `Transfer` until then, so that no allocator has to know of other streams.

On a CPU the memory of the host is a second memory, which is counted. A copy runs where it ends, the last moment at
which it may, so that writing to the value in between is noticed there as well.
"""

from __future__ import annotations

import functools
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autopar.letters import NotServed


@dataclass(slots=True, eq=False)
class Buffer:
    """Bytes of the host's memory that values use one after another."""

    memory: Tensor
    is_pinned: bool
    copied: Any = None  # the CUDA event behind the last copy that read or wrote it

    @property
    def address(self) -> int:
        return self.memory.data_ptr()


class HostMemory:
    """The host's memory for values that wait, counted; buffers are kept for later values of their size.

    Pinning memory takes milliseconds, and the values of each step are those of the step before. What is free is kept
    while all buffers together are no larger than the values that once were there at a time.
    """

    def __init__(self) -> None:
        self.bytes = 0  # bytes of the values that are there
        self.peak = 0
        # Overwrite the device's memory where a copy to the host ends: what reads it later reads no number.
        self.overwrites = False
        self._most = 0
        self._idle = 0
        self._free: dict[tuple[int, bool], list[Buffer]] = {}
        self._lent: dict[int, Buffer] = {}  # address -> buffer
        self._lock = threading.RLock()  # a value may end in any thread, and inside of this class

    def lend(self, like: Tensor) -> Tensor:
        """Memory for a value, laid out as the value is; it is free again once no tensor shows it."""
        extent = 1 + sum((n - 1) * step for n, step in zip(like.shape, like.stride(), strict=True))
        nbytes = extent * like.element_size() if like.numel() else 0
        with self._lock:
            buffer = self._taken(nbytes, like.is_cuda)
            self.bytes += nbytes
            self.peak = max(self.peak, self.bytes)
            self._lent[buffer.address] = buffer
        window = buffer.memory.numpy()  # an array of its own, whose life is that of the value
        weakref.finalize(window, self._give_back, buffer).atexit = False
        return torch.from_numpy(window).view(like.dtype).as_strided(like.shape, like.stride())

    def buffer_of(self, value: Tensor) -> Buffer:
        """The buffer of a value that is there; a letter where the value was copied on its way to backward."""
        buffer = self._lent.get(value.untyped_storage().data_ptr())
        if buffer is None:
            raise NotServed(
                "a value that waits on the host for backward has been copied: its own copy may have been under way",
                advice="no torch.autograd.graph.saved_tensors_hooks around the model, or a plan without host_budget",
            )
        return buffer

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory is that of a value which waits here."""
        return tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in self._lent

    def restart(self) -> None:
        """Count a peak anew, from what is there now."""
        self.peak = self.bytes

    def _taken(self, nbytes: int, is_pinned: bool) -> Buffer:
        free = self._free.get((nbytes, is_pinned))
        if free:
            self._idle -= nbytes
            return free.pop()
        self._most = max(self._most, self.bytes + nbytes)
        for idle in self._free.values():
            while idle and self.bytes + self._idle + nbytes > self._most:
                self._idle -= idle.pop(0).memory.numel()
        if is_pinned:
            return Buffer(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True), is_pinned)
        return Buffer(torch.from_numpy(np.empty(nbytes, np.uint8)), is_pinned)

    def _give_back(self, buffer: Buffer) -> None:
        with self._lock:
            nbytes = buffer.memory.numel()
            del self._lent[buffer.address]
            self.bytes -= nbytes
            self._idle += nbytes
            self._free.setdefault((nbytes, buffer.is_pinned), []).append(buffer)


HOST = HostMemory()


@dataclass(slots=True, eq=False)
class Transfer:
    """A copy under way, which keeps what it reads and what it writes until it has ended."""

    source: Tensor | None
    arrives: Tensor
    event: Any = None  # the CUDA event behind the copy

    def end(self) -> Tensor:
        """What has arrived, for all that the device runs from here on."""
        assert self.source is not None
        if self.event is None:
            self.arrives.copy_(self.source)
        else:
            self._wait()
        self.source = None
        return self.arrives

    def __del__(self) -> None:
        """Where an error leaves a copy without an end, its memory is used again only behind it."""
        if self.source is not None and self.event is not None:
            self._wait()

    def _wait(self) -> None:
        on_device = self.arrives if self.arrives.is_cuda else self.source
        assert on_device is not None
        torch.cuda.current_stream(on_device.device).wait_event(self.event)


def begin_to_host(x: Tensor) -> Transfer:
    """Begin to copy a value to the host."""
    host = HOST.lend(x)
    buffer = HOST.buffer_of(host)
    return Transfer(x, host, _copy(host, x, buffer, "down") if x.is_cuda else None)


def end_to_host(transfer: Transfer) -> Tensor:
    """The value on the host. What runs on the device from here on may use its memory there."""
    source = transfer.source
    host = transfer.end()
    if HOST.overwrites and source is not None:
        source.fill_(_nothing(source.dtype))
    return host


def begin_from_host(host: Tensor, device: str) -> Transfer:
    """Begin to copy a value from the host into new memory of a kind of device."""
    buffer = HOST.buffer_of(host)
    there = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
    return Transfer(host, there, _copy(there, host, buffer, "up") if there.is_cuda else None)


def end_from_host(transfer: Transfer) -> Tensor:
    """The value on the device, for what runs from here on."""
    return transfer.end()


def _copy(into: Tensor, source: Tensor, buffer: Buffer, way: str) -> Any:
    """Copy beside the compute; returns the event behind the copy.

    The source has to be made first, or the memory that is written to has to be free: the compute stream tells of both.
    """
    device = into.device if into.is_cuda else source.device
    beside = _stream(device.index, way)
    beside.wait_stream(torch.cuda.current_stream(device))
    if buffer.copied is not None:
        beside.wait_event(buffer.copied)
    with torch.cuda.stream(beside):
        into.copy_(source, non_blocking=True)
    buffer.copied = beside.record_event()
    return buffer.copied


@functools.cache
def _stream(device: int, way: str) -> Any:
    """The stream of a device's copies in one direction."""
    return torch.cuda.Stream(device)


def _nothing(dtype: torch.dtype) -> Any:
    """A number that shows wherever it is read: NaN, or else the largest of its dtype."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max

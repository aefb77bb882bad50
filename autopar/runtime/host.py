"""Copies of values that wait for backward, and of parameters that lie on the host: to its memory, and back.

    begin_to_host      the copy begins
    end_to_host        the value on the host; the device's memory may be used again
    begin_from_host    the copy back begins, into new memory of the device
    begin_up           the same of a parameter's part, which stays where it lies
    end_from_host      the value on the device, laid out as it was

On a GPU each direction has a stream of its own, and the host waits for neither: a copy waits for what the compute
stream has been given when the copy begins, and the compute stream waits for the event of the copy where the copy ends.
Memory of either side is used again only behind an end, so that no allocator has to know of other streams; a `Transfer`
keeps what is copied until then.

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
        self._free: dict[tuple[int, bool], list[Tensor]] = {}  # bytes and whether they are pinned -> buffers
        self._lent = set[int]()  # addresses
        self._lock = threading.RLock()  # a value may end in any thread, and inside of this class

    def lend(self, like: Tensor) -> Tensor:
        """Memory for a value, laid out as the value is; it is free again once no tensor shows it."""
        extent = 1 + sum((n - 1) * step for n, step in zip(like.shape, like.stride(), strict=True))
        nbytes = extent * like.element_size()
        if not like.numel():  # Some rank has no part of it.
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        with self._lock:
            buffer = self._taken(nbytes, like.is_cuda)
            self.bytes += nbytes
            self.peak = max(self.peak, self.bytes)
            self._lent.add(buffer.data_ptr())
        window = buffer.numpy()  # an array of its own, whose life is that of the value
        weakref.finalize(window, self._give_back, buffer, like.is_cuda).atexit = False
        return torch.from_numpy(window).view(like.dtype).as_strided(like.shape, like.stride())

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory is that of a value which waits here."""
        address = tensor.untyped_storage().data_ptr()
        return tensor.device.type == "cpu" and (not tensor.numel() or address in self._lent)

    def restart(self) -> None:
        """Count a peak anew, from what is there now."""
        self.peak = self.bytes

    def _taken(self, nbytes: int, is_pinned: bool) -> Tensor:
        free = self._free.get((nbytes, is_pinned))
        if free:
            self._idle -= nbytes
            return free.pop()
        self._most = max(self._most, self.bytes + nbytes)
        for idle in self._free.values():
            while idle and self.bytes + self._idle + nbytes > self._most:
                self._idle -= idle.pop(0).numel()
        if is_pinned:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        array: np.ndarray = np.empty(nbytes, np.uint8)
        self._lent.add(array.ctypes.data)  # Known before torch knows of it: what counts tensors asks whose it is.
        return torch.from_numpy(array)

    def _give_back(self, buffer: Tensor, is_pinned: bool) -> None:
        with self._lock:
            self._lent.remove(buffer.data_ptr())
            self.bytes -= buffer.numel()
            self._idle += buffer.numel()
            self._free.setdefault((buffer.numel(), is_pinned), []).append(buffer)


HOST = HostMemory()
_DOWN = "to the host"
_UP = "from the host"
_STEPPED = "from the host, beside backward"


@dataclass(slots=True, eq=False)
class Transfer:
    """A copy under way, which keeps what it reads and what it writes until it has ended."""

    source: Tensor | None
    arrives: Tensor
    event: Any = None  # the CUDA event behind the copy

    def end(self) -> Tensor:
        """End the copy, and return the tensor for all that the device runs from here on."""
        assert self.source is not None
        if self.event is None:
            self.arrives.copy_(self.source)
        else:
            self._wait()
        self.source = None
        return self.arrives

    def end_on_host(self) -> Tensor:
        """Wait on the host until the copy has ended; returns what was written."""
        assert self.source is not None
        if self.event is None:
            self.arrives.copy_(self.source)
        else:
            self.event.synchronize()
        self.source = None
        return self.arrives

    def __del__(self) -> None:
        """Let later work wait for a copy that an error has broken off."""
        if self.source is not None and self.event is not None:
            self._wait()

    def _wait(self) -> None:
        on_device = self.arrives if self.arrives.is_cuda else self.source
        assert on_device is not None
        torch.cuda.current_stream(on_device.device).wait_event(self.event)


def begin_to_host(x: Tensor) -> Transfer:
    """Begin to copy a value to the host."""
    host = HOST.lend(x)
    return Transfer(x, host, _copy(host, x, _DOWN) if x.is_cuda else None)


def end_to_host(transfer: Transfer) -> Tensor:
    """The value on the host. What runs on the device from here on may use its memory there."""
    source = transfer.source
    host = transfer.end()
    if HOST.overwrites and source is not None:
        source.fill_(_nothing(source.dtype))
    return host


def begin_from_host(host: Tensor, device: str) -> Transfer:
    """Begin to copy a value from the host into new memory of a kind of device."""
    if not HOST.holds(host):
        raise NotServed(
            "a value that waits on the host for backward has been copied: its own copy may have been under way",
            advice="no torch.autograd.graph.saved_tensors_hooks around the model, or a plan without values on the host",
        )
    return begin_up(host, device)


def begin_up(part: Tensor, device: str) -> Transfer:
    """Begin to copy the part of a parameter that lies on the host into new memory of a kind of device."""
    there = torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device=device)
    if HOST.overwrites and not there.is_cuda:
        there.fill_(_nothing(there.dtype))  # What reads it before the copy ends reads no number.
    return Transfer(part, there, _copy(there, part, _UP) if there.is_cuda else None)


def begin_onto(tensor: Tensor, host: Tensor, is_unread: bool = False) -> Transfer:
    """Begin to copy a value of the host over a tensor of the device.

    Where it `is_unread`, nothing that the device still runs reads the tensor, and the copy waits for nothing.
    """
    way = _STEPPED if is_unread else _UP
    return Transfer(host, tensor, _copy(tensor, host, way, waits=not is_unread) if tensor.is_cuda else None)


def end_from_host(transfer: Transfer) -> Tensor:
    """The value on the device, for what runs from here on."""
    return transfer.end()


def settle_copies(device: torch.device) -> None:
    """Let the host wait until no copy of a device is under way: it reads or writes what they are of.

    On a CPU a copy runs where it ends.
    """
    if device.type == "cuda":
        for way in (_DOWN, _UP):
            _stream(torch.cuda.current_device() if device.index is None else device.index, way).synchronize()


def _copy(into: Tensor, source: Tensor, way: str, waits: bool = True) -> Any:
    """Copy beside the compute; returns the event behind the copy.

    Before it the compute stream makes the source, or leaves the memory that is written to: the copy `waits` for that.
    """
    device = into.device if into.is_cuda else source.device
    beside = _stream(device.index, way)
    if waits:
        beside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(beside):
        into.copy_(source, non_blocking=True)
    return beside.record_event()


@functools.cache
def _stream(device: int, way: str) -> Any:
    """The stream of a device's copies in one direction."""
    return torch.cuda.Stream(device)


def _nothing(dtype: torch.dtype) -> Any:
    """A number that shows wherever it is read: NaN, or else the largest of its dtype."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max

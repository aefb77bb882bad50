"""The host's memory of values that wait: what comes back is what left, laid out as it was, and buffers are kept."""

from __future__ import annotations

import contextlib

import pytest
import torch

from autopar.letters import NotServed
from autopar.runtime.host import (
    HOST,
    HostMemory,
    Transfer,
    _copy,
    _stream,
    begin_from_host,
    begin_to_host,
    end_from_host,
    end_to_host,
)

VALUES = {
    "turned": lambda: torch.randn(4, 6, 3).permute(2, 0, 1),
    "with gaps": lambda: torch.randn(4, 8)[:, ::2],
    "half": lambda: torch.randn(5, 7).bfloat16(),
    "whole numbers": lambda: torch.randint(0, 9, (3, 5)),
    "marks": lambda: torch.rand(3, 5) > 0.5,
    "complex": lambda: torch.randn(3, dtype=torch.complex64),
    "one": lambda: torch.randn(()),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_returns_as_it_was_and_its_memory_is_free_meanwhile(name, monkeypatch):
    monkeypatch.setattr(HOST, "overwrites", True)
    x = VALUES[name]()
    expected, before = x.clone(memory_format=torch.preserve_format), HOST.bytes
    host = end_to_host(begin_to_host(x))
    assert HOST.bytes > before and HOST.holds(host) and not HOST.holds(x)
    assert not torch.equal(x, expected)
    back = end_from_host(begin_from_host(host, "cpu"))
    assert torch.equal(back, expected) and back.stride() == x.stride() and not HOST.holds(back)
    del host
    assert HOST.bytes == before


def test_a_value_of_no_elements_travels_as_well():
    """The part of a rank that has none of it."""
    x = torch.randn(0, 3)
    back = end_from_host(begin_from_host(end_to_host(begin_to_host(x)), "cpu"))
    assert back.shape == x.shape


def test_writing_to_a_value_on_its_way_is_noticed():
    x = torch.ones(4)
    pending = begin_to_host(x)
    x.zero_()
    assert not end_to_host(pending).any()


def test_buffers_are_kept_while_they_are_no_more_than_once_were_there():
    memory = HostMemory()
    first, second = memory.lend(torch.empty(100)), memory.lend(torch.empty(50))
    address = first.data_ptr()
    assert (memory.bytes, memory.peak) == (600, 600)
    view = first[:10]
    del first
    assert memory.bytes == 600  # a view holds it
    del view
    assert (memory.bytes, memory.peak) == (200, 600)
    again = memory.lend(torch.empty(100))
    assert again.data_ptr() == address
    del again, second
    other = memory.lend(torch.empty(150))  # as much as both before: they go
    assert memory.bytes == memory.peak == 600 and memory._idle == 0
    memory.restart()
    del other
    assert (memory.bytes, memory.peak) == (0, 600)


def test_a_copy_of_what_waits_is_a_letter():
    host = end_to_host(begin_to_host(torch.ones(4)))
    with pytest.raises(NotServed, match="waits on the host"):
        begin_from_host(host.clone(), "cpu")


class Stream:
    """A stream of a GPU that is not there: it knows what has to have run before what it is given next."""

    def __init__(self, device=None) -> None:
        self.behind = set[str]()

    def wait_stream(self, other) -> None:
        self.behind |= other.behind

    def wait_event(self, event) -> None:
        self.behind |= event

    def record_event(self):
        return frozenset(self.behind)


@pytest.fixture
def compute(monkeypatch):
    """The compute stream; copies note on what they run behind, and are named by their numbers."""
    stream = Stream()
    now = [stream]

    @contextlib.contextmanager
    def inside(beside):
        now.append(beside)
        yield
        now.pop()

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: now[-1])
    monkeypatch.setattr(torch.cuda, "stream", inside)
    _stream.cache_clear()
    stream.copies = {}

    def copied(self, source, non_blocking):
        assert non_blocking and now[-1] is not stream
        name = f"copy {len(stream.copies)}"
        stream.copies[name] = set(now[-1].behind)
        now[-1].behind.add(name)

    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    yield stream
    _stream.cache_clear()


def test_streams_wait_for_each_other(compute):
    """A copy for what makes its source, and compute for the copy, where it ends or is broken off, and not before."""
    x, host = torch.ones(4), torch.ones(4)
    compute.behind.add("x")
    down = Transfer(x, host, _copy(host, x, "to the host"))
    assert compute.copies["copy 0"] == {"x"} and compute.behind == {"x"}
    compute.behind.add("beside it")
    assert down.end() is host and down.source is None
    assert compute.behind == {"x", "beside it", "copy 0"}
    up = Transfer(host, x, _copy(x, host, "from the host"))
    assert compute.copies["copy 1"] == {"x", "beside it", "copy 0"} and "copy 1" not in compute.behind
    del up  # by an error
    assert "copy 1" in compute.behind
    _copy(host, x, "to the host")
    assert "copy 1" in compute.copies["copy 2"]

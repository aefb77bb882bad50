"""Devices that are threads of one process, on which local forms are tried."""

from __future__ import annotations

import time

import pytest
import torch

from autopar.runtime.rehearsal import Rehearsal


@pytest.mark.parametrize("silent", [0, 1, 2])
def test_a_message_that_one_device_does_not_send_is_an_error_at_once(silent):
    rehearsal, began = Rehearsal(3), time.monotonic()

    def body(index):
        return None if index == silent else rehearsal.convert(index, torch.ones(2), "all_reduce@rehearsed")

    with pytest.raises(RuntimeError, match="waits for a message that another does not send"):
        rehearsal.run(body)
    assert time.monotonic() - began < 10

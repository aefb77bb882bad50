"""Fixtures that any test may use in one line.

`threads(4, body, ...)`, `local_tensor(4, ...)`, `processes(4, ...)`, `fake_world(64)`.
"""

from __future__ import annotations

import gc
import logging
import os
from multiprocessing import forkserver

import hypothesis
import pytest
import torch
import torch.distributed as dist

from autopar.testing import fake_world as _fake_world
from autopar.testing import on_local_tensor, on_processes, on_threads

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read where a kernel is defined
torch.set_num_threads(1)
# A full collection looks through a million objects of torch and of models, which stay: by default it comes so often
# that it takes a tenth of the time of the tests.
gc.set_threshold(10_000, 20, 100)
hypothesis.settings.register_profile(
    "shared", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)  # other processes have the cores too
hypothesis.settings.load_profile("shared")
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(
    logging.ERROR
)  # full_tensor() of a dim cut twice warns on every call


def pytest_collection_finish(session):
    """Start the server that forks ranks with more imports than `autopar.testing` asks for.

    A running server keeps what it has, whatever is asked of it later.
    """
    if any(item.get_closest_marker("machines") for item in session.items):
        forkserver.set_forkserver_preload(["lightning.pytorch", "accelerate", "peft", "tests.preload"])
        forkserver.ensure_running()


@pytest.fixture
def threads():
    return on_threads


@pytest.fixture
def local_tensor():
    return on_local_tensor


@pytest.fixture
def processes():
    return on_processes


@pytest.fixture
def fake_world():
    return _fake_world


@pytest.fixture(autouse=True)
def _same_numbers_every_time():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_level_of_a_command_outlives_its_test():
    """A command with --quiet sets the level of the process, as a command may."""
    yield
    logging.getLogger("autopar").setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def _no_world_outlives_its_test():
    yield
    if dist.is_initialized():  # a world of one, that autoparallelize started
        dist.destroy_process_group()

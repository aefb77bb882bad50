"""Unmodified models x presets and the free plan x meshes against eager, dropout on.

Every case nightly, by day some plans and meshes, each with another model.
"""

from __future__ import annotations

import itertools

import pytest

from tests.equality.matrix import CASES, MESHES, MODELS, worst
from tests.shares import by_day
from tests.zoo.families import has_extras

QUICKEST = ("gpt2", "bert", "vit")  # for a mesh with an axis of one device
SLOW = ("swin", "five blocks of resnet", "timm mixer", "convnext")  # many small ops, or large ones: in the sample once

ON_PROCESSES = dict(tensor=2, data=dict(size=2, zero=3))


def sample():
    """Cases that hold each model, each plan on one axis and on two, and most pairs of model and plan.

    The mesh with an axis of one device has two axes besides, and stands for them in the free plan; the plan of tensors
    and ZeRO-3 runs on processes.
    """
    two = list(MESHES)[1]
    kinds = [
        (mesh, preset)
        for mesh, presets in MESHES.items()
        for preset in presets
        if mesh.size == 4  # random modules by day, and these nightly, run on eight devices
        if (preset in (None, "2d") if 1 in mesh.shape else (mesh, preset) not in ((two, None), (two, ON_PROCESSES)))
    ]
    slow = {(6 * i + 3) % len(kinds): name for i, name in enumerate(SLOW)}  # apart, each in a plan of its own
    quick, quickest = itertools.cycle(m for m in MODELS if m not in (*SLOW, "resnet50")), itertools.cycle(QUICKEST)
    return [
        (slow.get(i) or next(quickest if 1 in mesh.shape else quick), mesh, preset)
        for i, (mesh, preset) in enumerate(kinds)
    ]


SAMPLE = sample()
DAILY = [
    (name, mesh, preset)
    for name, mesh, preset in SAMPLE
    if (name, preset)
    in (
        ("gpt2", "dp"),
        ("qwen3", "zero3"),
        ("bert", "2d"),
    )
]


def checked(name, mesh, preset, processes=False):
    if name.startswith("timm") and not has_extras():
        pytest.skip("timm is not installed beside the tests: make test does")
    assert worst(name, mesh, preset, processes) is not None or isinstance(preset, dict) or "2d" in str(preset)


@pytest.mark.parametrize("name, mesh, preset", by_day(SAMPLE, *DAILY), ids=str)
def test_some_models_and_plans_train_as_one_device(name, mesh, preset):
    checked(name, mesh, preset)


@pytest.mark.nightly
@pytest.mark.parametrize("name, mesh, preset", [c for c in CASES if c not in SAMPLE], ids=str)
def test_every_model_and_plan_trains_as_one_device(name, mesh, preset):
    checked(name, mesh, preset)


@pytest.mark.machines
@pytest.mark.parametrize("name, mesh, preset", [("llama", list(MESHES)[1], ON_PROCESSES)], ids=str)
def test_on_processes(name, mesh, preset):
    checked(name, mesh, preset, processes=True)


@pytest.mark.nightly
@pytest.mark.parametrize("name, mesh, preset", [c for c in SAMPLE if c[1].size == 4], ids=str)
def test_the_sample_on_processes(name, mesh, preset):
    checked(name, mesh, preset, processes=True)

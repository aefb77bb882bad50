"""Classes drawn by lot from all model classes of the installed transformers.

Those that build from a small config and run eagerly.

python -m tests.zoo.lot 2026 20        # seed, how many; prints name and what capture makes of it
"""

from __future__ import annotations

import contextlib
import io
import logging
import random
import sys
import warnings

import torch
import transformers

from autopar.letters import Letter
from tests.zoo.families import any_hf, any_inputs
from tests.zoo.replay import as_call, check

LARGEST = 20_000_000  # parameters of what counts as small


def model_classes() -> list[str]:
    """Every public model class, in alphabetical order."""
    names = []
    for name in sorted(dir(transformers)):
        with contextlib.suppress(Exception):
            cls = getattr(transformers, name)
            if (
                isinstance(cls, type)
                and issubclass(cls, transformers.PreTrainedModel)
                and getattr(cls, "config_class", None)
                and "PreTrained" not in name
                and "Pretrained" not in name
            ):
                names.append(name)
    return names


def runs_eagerly(name: str) -> bool:
    """Does it build small, and run forward and backward by itself?"""
    try:
        with torch.device("meta"):
            size = sum(p.numel() for p in any_hf(name)().parameters())
        if not 0 < size < LARGEST:
            return False
        torch.manual_seed(0)
        args, kwargs = as_call(any_inputs(name)())
        any_hf(name)().train()(*args, **kwargs)
        return True
    except Exception:
        return False


def draw(seed: int, count: int) -> list[str]:
    """The first `count` of a seeded order that run eagerly."""
    names = model_classes()
    random.Random(seed).shuffle(names)
    drawn = []
    for name in names:
        if runs_eagerly(name):
            drawn.append(name)
            if len(drawn) == count:
                break
    return drawn


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    with contextlib.redirect_stderr(io.StringIO()):
        for drawn in draw(int(sys.argv[1]), int(sys.argv[2])):
            try:
                graph = check(any_hf(drawn), any_inputs(drawn), what=drawn)
                print(
                    f"{drawn:45} captured and equal, {len(list(graph.nodes))} nodes",
                    *graph.assumptions[:3],
                    sep="  ",
                    flush=True,
                )
            except Letter as e:
                print(f"{drawn:45} refused: {e!s}", flush=True)
            except Exception as e:
                print(f"{drawn:45} FAILED {type(e).__name__}: {str(e)[:300]}", flush=True)

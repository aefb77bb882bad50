"""Which kernels were measured to be faster on a device: what `kernels=True` takes.

`python -m autopar.bench kernels` keeps it in a file of this user's, by the name of the device; AUTOPAR_CACHE says in
which folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from autopar.kernels import NAMES, can_run

VARIABLE = "AUTOPAR_CACHE"


def path() -> Path:
    """The file."""
    folder = os.environ.get(VARIABLE) or Path.home() / ".cache" / "autopar"
    return Path(folder) / "kernels.json"


def keep(device: str, gains: Mapping[str, float]) -> Path:
    """Keep how many times as fast as the ops of each family its kernel is, where that is least; return the file."""
    known = _read()
    known[device] = {**known.get(device, {}), **gains}
    path().parent.mkdir(parents=True, exist_ok=True)
    path().write_text(json.dumps(known, indent=2) + "\n")
    return path()


def taken(asked: bool | tuple[str, ...], whose: str) -> tuple[str, ...]:
    """The families that take the place of ops on devices whose kernels are these: those that were named, or faster."""
    if asked is True:
        return faster() if whose == "cuda" else ()
    return asked or ()


def faster() -> tuple[str, ...]:
    """The families that are faster on the device of this process, on all shapes that were measured."""
    if not (can_run() and torch.cuda.is_available()):
        return ()
    gains = _read().get(torch.cuda.get_device_name(), {})
    return tuple(name for name in NAMES if gains.get(name, 0.0) > 1.0)


def _read() -> dict[str, dict[str, float]]:
    """All that is kept; nothing where there is no such file, or something else in it."""
    try:
        found = json.loads(path().read_text())
        return {str(device): {str(n): float(gain) for n, gain in gains.items()} for device, gains in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}

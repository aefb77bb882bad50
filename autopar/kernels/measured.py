"""Which kernels were measured to be faster on a device: what `kernels=True` takes.

The gains stand in a file of this user, by the name of the device; AUTOPAR_CACHE names its folder. A kernel is compared
with what runs without it: the ops one by one, or, in a program that torch.compile makes, their compiled form
(`COMPILED` behind a family's name). A device that is not in the file is measured when a plan first asks, in some
seconds: one shape of each family beside its ops. `python -m autopar.bench kernels` measures more shapes, and
torch.compile as well.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from autopar.kernels import NAMES, can_run

VARIABLE = "AUTOPAR_CACHE"
COMPILED = " compiled"


def path() -> Path:
    """The file of measured gains."""
    folder = os.environ.get(VARIABLE) or Path.home() / ".cache" / "autopar"
    return Path(folder) / "kernels.json"


def keep(device: str, gains: Mapping[str, float]) -> Path:
    """Keep each kernel's least speed-up over what runs without it, by device; returns the file."""
    known = _read()
    known[device] = {**known.get(device, {}), **gains}
    path().parent.mkdir(parents=True, exist_ok=True)
    part = path().with_suffix(f".{os.getpid()}.part")  # ranks that write at once: whoever reads sees a whole file
    part.write_text(json.dumps(known, indent=2) + "\n")
    part.replace(path())
    return path()


def taken(asked: bool | tuple[str, ...], whose: str, compiled: bool) -> tuple[str, ...]:
    """Families of kernels that replace ops: those in `asked`, or if True those measured to be faster.

    `whose` is the kind of the device's kernels.
    """
    if asked is True:
        return faster(compiled) if whose == "cuda" else ()
    return asked or ()


def faster(compiled: bool = False) -> tuple[str, ...]:
    """The families that are faster on the device of this process, on all shapes that were measured."""
    if not (can_run() and torch.cuda.is_available()):
        return ()
    device = torch.cuda.get_device_name()
    gains = _read().get(device, {})
    if missing := tuple(name for name in NAMES if name not in gains):
        gains = {**gains, **_measured_now(device, missing)}
    return tuple(name for name in NAMES if gains.get(name + COMPILED * compiled, 0.0) > 1.0)


@functools.cache
def _measured_now(device: str, names: tuple[str, ...]) -> Mapping[str, float]:
    """Gains of families on this device, measured and kept; once in a process, whatever the file says."""
    from autopar.kernels.timing import least_gains, measure  # here: it loads every family, and torch's timer

    said = f"autopar: measuring its kernels on {device}, once; kept in {path()}"
    print(said, file=sys.stderr, flush=True)
    gains = dict[str, float]()
    for name in names:
        try:
            gains |= least_gains(measure((name,), "cuda", quick=True))
        # the compiler's, the driver's, or no memory: the ops run, and the next process tries again
        except Exception as e:
            print(f"autopar: the kernels of {name} do not run on {device}: {e!r}", file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):  # a folder that cannot be written: measured again by the next process
        keep(device, gains)
    found = ", ".join(f"{name} {gain:.2f}" for name, gain in gains.items())
    print(f"autopar: times as fast as the ops one by one: {found}", file=sys.stderr, flush=True)
    return gains


def _read() -> dict[str, dict[str, float]]:
    """All gains in the file; nothing where it is missing or unreadable."""
    try:
        found = json.loads(path().read_text())
        known = dict[str, dict[str, float]]()
        for device, gains in found.items():
            known[str(device)] = {str(name): float(gain) for name, gain in gains.items()}
        return known
    except (OSError, ValueError, TypeError, AttributeError):
        return {}

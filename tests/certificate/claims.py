"""The whole value that a claim of the certificate says two devices' outputs are of."""

from __future__ import annotations

import torch

from autopar.certificate.types import axes_of

AXIS = "a"


class DevicesDiffer(Exception):
    pass


def combined(outputs, claim):
    """The whole value that a claim says the devices' outputs are of."""
    if AXIS in claim.sums:
        return sum(outputs)
    if AXIS in claim.most:
        return torch.maximum(*outputs)
    if AXIS not in axes_of(claim.dims):
        if not torch.allclose(outputs[0].double(), outputs[1].double(), equal_nan=True):
            raise DevicesDiffer
        return outputs[0]
    (d,) = (d for d, dim in enumerate(claim.dims) if axes_of([dim]))
    atoms = claim.dims[d]
    at = next(i for i, (_, axes) in enumerate(atoms) if axes)
    sizes = [n for n, _ in atoms]
    return torch.cat([x.unflatten(d, sizes) for x in outputs], d + at).flatten(d, d + len(sizes) - 1)

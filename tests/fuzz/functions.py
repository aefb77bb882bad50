"""Any function of torch as a step of a random module.

Drawn from torch's own table of operators, the vocabulary and beyond it.

The tensors of a call become parameters and buffers of the module, so that a random plan cuts them as it may; what comes
out is added to a value of the module. A function of one tensor may also be applied to that value itself.
"""

from __future__ import annotations

import copy
import functools

import torch
from torch.utils import _pytree as pytree

from tests.ops.audit import TENSOR, calls_of, table

# They draw, or come out with another sign, order or rounding where numbers are almost the same: the audit proves these
# op by op.
OUTSIDE = (
    "rand",
    "drop",
    "normal",
    "bernoulli",
    "multinomial",
    "rrelu",
    "fractional",
    "lowrank",
    "item",
    "exponential",
    "cauchy",
    "geometric",
    "uniform",
    "linalg",
    "svd",
    "eig",
    "qr",
    "lu",
    "chole",
    "inverse",
    "solve",
    "ormqr",
    "det",
    "empty",
    "signal",
    "grid_sample",
    "bincount",
    "unique",
    "histogram",
    "hash",
    "masked_select",
    "nonzero",
    "argwhere",
    "narrow",
    "equal",
    "allclose",
    "cov",
    "corrcoef",
    "combinations",
    "ctc",
    "lstsq",
    "scaled_dot",
    "multi_head",
    "float8",
    "_flash",
    "_efficient",
    "native_batch",
    "_native",
    "_batch_norm",
    "resize",
    "as_strided",
    "tensor_split",
    "spectral",
    "renorm",
)
MOST = 512  # elements of a call's tensors


@functools.cache
def functions():
    """The entries that are drawn from, by name."""
    return [e for e in table() if not any(word in e.name for word in OUTSIDE)]


@functools.cache
def calls(place: int):
    """Up to six calls of the entry at a place."""
    try:
        return [
            (args, kwargs)
            for args, kwargs in calls_of(functions()[place], 6)
            if sum(t.numel() for t in tensors_of((args, kwargs))) <= MOST
        ]
    except Exception:  # its samples need what this machine does not have
        return []


def tensors_of(value):
    return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def of_torch(model, values):
    """A step: one call of one function, on tensors of the module's own."""
    place = model.rng.randrange(len(functions()))
    entry, found = functions()[place], calls(place)
    i = model.pick(values, lambda v: v.dim() > 0)
    if not found or i is None:
        return None
    arguments = found[model.rng.randrange(len(found))]
    held = []
    for tensor in tensors_of(arguments):
        if (
            tensor.layout is not torch.strided
            or tensor.is_complex()
            or not tensor.numel() > 0
            or not bool(torch.isfinite(tensor).all())
        ):
            return None
        name = f"t{len(model._parameters) + len(model._buffers)}"
        fresh = tensor.detach().clone().contiguous()
        if tensor.requires_grad:
            model.register_parameter(name, torch.nn.Parameter(fresh))
        else:
            model.register_buffer(name, fresh)
        held.append(name)
    pattern = pytree.tree_map_only(
        torch.Tensor,
        lambda t: TENSOR,
        copy.deepcopy(pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, arguments)),
    )

    def done(vs, ids):
        waiting = iter(held)
        args, kwargs = pytree.tree_map_only(str, lambda v: getattr(model, next(waiting)) if v == TENSOR else v, pattern)
        outputs = [t for t in tensors_of(entry.op(*args, **kwargs)) if not t.is_complex() and t.numel()]
        added = sum((t.double().tanh() if t.dtype != torch.float64 else t.tanh()).mean() for t in outputs)
        return vs[i] + 0.3 * added

    if not _is_steady(model, held, done, values):
        return None
    model.called.append(entry.name)
    return [i], done


def _is_steady(model, held, done, values):
    """Do result and gradients stay when numbers change in their last digits?

    A call whose results do not stay is no test of a plan.
    """
    parameters = [getattr(model, n) for n in held if n in model._parameters]
    seen = []
    try:
        for change in (0.0, 3e-14):
            with torch.no_grad():
                before = [p.clone() for p in parameters]
                for p in parameters:
                    p.mul_(1 + change)
            out = done(values, None)
            gradients = (
                torch.autograd.grad(out.sum(), parameters, materialize_grads=True)
                if parameters and out.requires_grad
                else ()
            )
            if any(torch._is_zerotensor(g) for g in gradients):  # torch cannot add to these itself
                return False
            with torch.no_grad():
                for p, old in zip(parameters, before, strict=True):
                    p.copy_(old)
            seen.append([out.detach(), *gradients])
        for one, other in zip(*seen, strict=True):
            if (
                not bool(torch.isfinite(one).all())
                or float((one - other).norm()) > 1e-10 * max(1e-3, float(one.norm()))
                or float(one.abs().max()) > 1e3
            ):
                return False
    except Exception:  # the function does not take these
        return False
    return True

"""One training run, the same code for the single-device model and the parallel one, and what it leaves to compare."""

from __future__ import annotations

import contextlib
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

import autopar
from autopar.testing import Equality, Unequal
from tests.models import mean_square
from tests.oracle import PermutedSums

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
}
STEPS = 10


def whole(tensor):
    """A DTensor put together from what the ranks hold, by torch.chunk alone; copies must be equal.

    Not by full_tensor(): on threads it caches one rank's plan for uneven parts in the process, where other ranks find
    it, and torch 2.11 refuses it where a dim is cut by blocks.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    mesh, local = tensor.device_mesh, tensor.to_local()
    if dist.get_backend() == "fake":  # LocalTensors: nobody to ask
        return tensor.full_tensor()
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (mesh.get_coordinate(), local.detach()))
    result = torch.full(tensor.shape, float("nan"), dtype=local.dtype)
    for coordinate, part in parts:
        where = [torch.arange(n) for n in tensor.shape]
        for axis, placement in enumerate(tensor.placements):
            if not placement.is_replicate():
                blocks = where[placement.dim].chunk(getattr(placement, "split_factor", 1))
                pieces = [block.chunk(mesh.size(axis)) for block in blocks]
                where[placement.dim] = torch.cat(
                    [p[coordinate[axis]] if coordinate[axis] < len(p) else p[0][:0] for p in pieces]
                )
        index = torch.meshgrid(*where, indexing="ij") if where else ()
        if not torch.equal(result[index][~result[index].isnan()], part[~result[index].isnan()]):
            raise Unequal("copies differ between ranks")
        result[index] = part
    return result


def call(model, batch, loss: str):
    """The loss of one step: computed by the model, by `loss=`, or outside."""
    if loss == "inside":
        return model(**batch)
    if loss == "callable":
        return (
            model(x=batch["x"])[0]
            if isinstance(model, autopar.module.ParallelModule)
            else mean_square(model(batch["x"]), {})
        )
    return F.mse_loss(model(x=batch["x"]), batch["y"])


def train(model, batch, optimizer: str, loss: str = "inside", steps: int = STEPS):
    """Losses of every step, gradients of the first, parameters after the last."""
    parameters = dict(model.named_parameters())
    stepper = OPTIMIZERS[optimizer](parameters.values())
    losses, gradients = {}, {}
    for step in range(steps):
        stepper.zero_grad()
        value = call(model, batch, loss)
        value.backward()
        losses[f"loss.{step}"] = value.detach()
        if step == 0:
            gradients = {n: whole(p.grad).detach().clone() for n, p in parameters.items() if p.grad is not None}
        stepper.step()
    return losses, gradients, {n: whole(p).detach().clone() for n, p in parameters.items()}


def results(model, loss):
    """The loss and the gradients that it leaves, which are then forgotten."""
    loss.backward()
    found = {
        "loss": loss.detach(),
        **{n: whole(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None},
    }
    model.zero_grad()
    return found


def train_parallel(rank, model, batch, plan, runs):
    """Every (optimizer, loss, dtype) of `runs` under one plan for each dtype."""
    results = []
    for optimizer, loss, dtype in runs:
        mine, inputs = copies(model, batch, dtype, keep=rank is None)
        given = inputs if loss == "inside" else {"x": inputs["x"]}
        how = {"loss": mean_square} if loss == "callable" else {}
        parallel = autopar.autoparallelize(mine, given, plan=plan[loss, dtype], **how)
        results.append(train(parallel, inputs, optimizer, loss))
    return results


def copies(model, batch, dtype, keep=False):
    dtype = getattr(torch, dtype)
    if keep:  # one tensor for all ranks: torch's deepcopy does not know it
        return (model if next(model.parameters()).dtype == dtype else model.to(dtype)), {
            k: v.to(dtype) for k, v in batch.items()
        }
    return copy.deepcopy(model).to(dtype), {k: v.to(dtype) for k, v in batch.items()}


def eager(model, batch, optimizer, loss, dtype, permuted=None):
    mine, inputs = copies(model, batch, dtype)
    with contextlib.nullcontext() if permuted is None else PermutedSums(permuted):
        return train(mine, inputs, optimizer, loss)


def check(what, actual, model, batch, optimizer, loss, dtype):
    """Equality as the contract defines it, for losses, gradients and parameters."""
    expected = eager(model, batch, optimizer, loss, "float64")
    if dtype == "float64":
        for part, tolerance, a, e in zip(("losses", "gradients", "parameters"), (1e-9, 1e-9, 1e-8), actual, expected):
            Equality.in_float64(f"{what}: {part}", a, e, tolerance).check()
        return
    own = eager(model, batch, optimizer, loss, "float32")
    permuted = (
        [eager(model, batch, optimizer, loss, "float32", seed) for seed in range(5)] if optimizer == "adamw" else []
    )
    for i, part in enumerate(("losses", "gradients", "parameters")):
        Equality.in_float32(
            f"{what}: {part}", actual[i], own[i], expected[i], [p[i] for p in permuted] if i != 1 else ()
        ).check()

"""Put the values of a model's tensors in place: parameters as shards, buffers whole."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.graph.held import replace_plain_tensors
from autopar.module.checkpoint import read
from autopar.module.init import initialise, initialise_by_position, is_on_meta
from autopar.module.storage import Storage
from autopar.runtime.host_step import lying_on_host
from autopar.runtime.world import from_rank_0
from autopar.sharding.placement import Sharding


@dataclass(frozen=True, slots=True)
class Source:
    """Where values come from: the model's own tensors where they have values, else a file or recipes."""

    sync: bool = True  # rank 0's on all ranks; else each rank has them already
    init: str = "module"  # how recipes draw: "module" or "counter"
    weights: str | None = None  # a path of safetensors


def store(
    model: nn.Module,
    shardings: dict[str, Sharding],
    mesh_of: Callable[[str], Any],
    device: torch.device,
    source: Source,
    on_host: Collection[str] = (),
) -> dict[str, Storage]:
    """Replace every parameter by its shard and every buffer by a whole copy; returns storages by name.

    `mesh_of` gives the mesh of a parameter, and that of buffers for "". Tied parameters stay tied. The parts of
    parameters `on_host` lie there.
    """
    made = _Made(model, shardings, mesh_of, device, on_host)
    given = set() if source.weights is None else read(model, source.weights, made.places_of, made.keep_part)
    if is_on_meta(model, given):
        if source.init == "module":
            initialise(model, made.keep, given)
        else:
            seed = from_rank_0(lambda: int(torch.randint(0, 2**62, ())))
            initialise_by_position(model, seed, made.places_of, made.keep_part, given)
    for name, parameter in model.named_parameters():
        if id(parameter) not in made.parameters:
            made.keep(name, parameter, parameter.detach(), source.sync)
    made.put(source.sync)
    return made.storage


class _Made:
    """Makes the tensors of a parallel model one by one from those of the original model."""

    def __init__(
        self,
        model: nn.Module,
        shardings: dict[str, Sharding],
        mesh_of: Callable[[str], Any],
        device: torch.device,
        on_host: Collection[str],
    ) -> None:
        self.model = model
        self.on_host = on_host
        self.mesh = mesh_of("")
        self.device = device
        self.storage = {
            name: Storage.of(parameter, shardings.get(name), mesh_of(name))
            for name, parameter in model.named_parameters()
        }
        self.parameters: dict[int, nn.Parameter] = {}  # identity of a parameter -> the stored one
        self.buffers: dict[int, Tensor] = {}  # identity of a buffer -> its values on this rank
        self.old: list[Tensor] = []  # buffers that were replaced, so that their identities stay theirs

    def places_of(self, name: str, tensor: Tensor) -> list[Tensor]:
        """For each dim of a tensor, the indices that belong to this rank."""
        return (self.storage[name] if name in self.storage else self._whole(tensor)).places()

    def keep(self, name: str, tensor: Tensor, values: Tensor, sync: bool = False) -> None:
        """Keep this rank's part of a tensor's whole values."""
        values = values.to(self.device)
        if name in self.storage:
            self._store(name, tensor, self.storage[name].take(values, sync))
        else:
            self.buffers[id(tensor)] = values

    def keep_part(self, name: str, tensor: Tensor, local: Tensor) -> None:
        """Keep this rank's part, given as it is."""
        local = local.to(self.device)
        if name in self.storage:
            self._store(name, tensor, self.storage[name].wrap(local))
        else:
            self.buffers[id(tensor)] = local

    def _store(self, name: str, tensor: Tensor, stored: DTensor) -> None:
        """Keep a shard as the parameter that takes a tensor's place."""
        if name in self.on_host:
            stored = lying_on_host(stored)
        self.parameters[id(tensor)] = nn.Parameter(stored, requires_grad=tensor.requires_grad)

    def put(self, sync: bool) -> None:
        """Replace the model's parameters, buffers and tensor attributes by what was made."""
        for module in self.model.modules():
            for name, held in list(module._parameters.items()):
                if held is not None:
                    module._parameters[name] = self.parameters[id(held)]
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    module._buffers[name] = self._buffer(buffer, sync)
            replace_plain_tensors(module, lambda held: self._buffer(held, sync))  # a plain attribute is a buffer too

    def _whole(self, tensor: Tensor) -> Storage:
        return Storage.of(tensor, None, self.mesh)

    def _buffer(self, tensor: Tensor, sync: bool) -> Tensor:
        """The whole copy of a buffer, the same one wherever it stands."""
        if id(tensor) not in self.buffers:
            self.buffers[id(tensor)] = self._whole(tensor).spread(tensor.to(self.device), sync)
            self.old.append(tensor)
        return self.buffers[id(tensor)]

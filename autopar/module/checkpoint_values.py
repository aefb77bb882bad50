"""The values of a checkpoint as one tree, and its tensors by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.letters import NotServed


@dataclass(frozen=True)
class Stored:
    """Stands for a tensor: its name in torch.distributed.checkpoint."""

    name: str


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside torch.compile's or DDP's wrapper, by whose names everything is saved."""
    while True:
        inside = getattr(model, "_orig_mod", None)
        if isinstance(model, nn.parallel.DistributedDataParallel):
            inside = model.module
        if not isinstance(inside, nn.Module):
            return model
        model = inside


def listed(optimizer: Any) -> list[Any]:
    return list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]


def state_of(value: Any) -> Any:
    """The state of an object or of a list of objects that have one; other values as they are."""
    if hasattr(value, "state_dict"):
        return value.state_dict()
    if isinstance(value, (list, tuple)) and any(hasattr(each, "state_dict") for each in value):
        return [state_of(each) for each in value]
    return value


def set_state(value: Any, state: Any) -> None:
    if hasattr(value, "load_state_dict"):
        value.load_state_dict(state)
    elif isinstance(value, (list, tuple)):
        for each, its in zip(value, state, strict=True):
            set_state(each, its)


def names_of(model: nn.Module) -> dict[int, str]:
    """The names of a model's parameters, by identity."""
    return {id(parameter): name for name, parameter in unwrapped(model).named_parameters()}


def states_by_name(model: nn.Module, optimizers: Sequence[Any]) -> dict[str, Any]:
    """The states of optimizers by the names of parameters, as torch's `get_optimizer_state_dict` has them.

    That function makes a step with zero gradients where an optimizer has made none, which counts as one.
    """
    names = names_of(model)
    found: dict[str, Any] = {"state": {}, "param_groups": []}
    for optimizer in optimizers:
        held = optimizer.state_dict()
        own = [names.get(id(p), "") for group in optimizer.param_groups for p in group["params"]]
        if "" in own:
            raise NotServed(
                f"{type(optimizer).__name__} holds a parameter that is not the model's",
                advice="an optimizer of model.parameters(); another model and its optimizer are passed by name",
            )
        found["state"].update({own[i]: states for i, states in held["state"].items()})
        for group in held["param_groups"]:
            found["param_groups"].append({**group, "params": [own[i] for i in group["params"]]})
    return found


def split(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """A tree of values with a `Stored` in the place of each tensor, and the tensors by name."""
    tensors = dict[str, Tensor]()

    def take(path: tuple[Any, ...], leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        name = ".".join(map(word_of, path))
        while name in tensors:  # a key may have dots in it
            name += "'"
        tensors[name] = leaf.detach()
        return Stored(name)

    return pytree.tree_map_with_path(take, tree), tensors


def word_of(key: Any) -> str:
    """A key of a path as text: that of a mapping, a place in a list, or the name of a field."""
    return str(next(getattr(key, kind) for kind in ("key", "idx", "name") if hasattr(key, kind)))

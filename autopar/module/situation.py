"""Everything outside a program that it depends on: a call in another situation needs another program.

A situation changes with shapes, eval, which parameters train, or autocast. A call without gradients needs only half of
a program.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import itertools
import pickle
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.graph.calls import Call, learn_dataclasses
from autopar.graph.graph import Graph
from autopar.letters import BadInput
from autopar.module.attributes import Attributes, Sight
from autopar.module.limits import LIMITS

_SAID = (int, float, str, bool, bytes, complex, torch.dtype, torch.device, enum.Enum, type(None))


@dataclass(frozen=True, slots=True)
class Situation:
    """Everything of a call that its graph depends on."""

    # A tensor as shape, dtype, whether it wants a gradient and, of a DTensor, its placements; others as themselves.
    leaves: tuple[Any, ...]
    structure: pytree.TreeSpec
    modes: tuple[bool, ...]  # whether each module is in training
    trained: tuple[bool, ...]  # whether each parameter wants a gradient
    autocast: tuple[tuple[str, torch.dtype], ...]  # kinds of devices for which autocast is on, with its dtype
    said: int = 0  # number of the state of the modules, which is their attributes and hooks

    @property
    def wants_gradients(self) -> bool:
        """Whether a parameter or an input wants a gradient."""
        return any(self.trained) or any(len(leaf) > 2 and leaf[2] for leaf in self.leaves)

    def but_for(self, said: int) -> Situation:
        """This situation with the modules in another state."""
        return replace(self, said=said)

    def kind(self, with_rows: bool) -> tuple[Any, ...]:
        """A key of the situation without lengths and states of modules; with the number of rows where asked."""
        leaves = []
        for leaf in self.leaves:
            if isinstance(leaf[0], torch.Size):
                rows = leaf[0][:1] if with_rows else ()
                leaf = (len(leaf[0]), *rows, *leaf[1:])
            leaves.append(leaf)
        return tuple(leaves), self.structure, self.modes, self.trained, self.autocast

    def of_all_ranks(self) -> tuple[Any, ...]:
        """A key that ranks can compare: without states of modules, which each rank numbers for itself."""
        # a set is pickled in an order of its own
        leaves = [(leaf[0], None) if isinstance(leaf[1], bytes) else leaf for leaf in self.leaves]
        return leaves, self.structure, self.modes, self.trained, self.autocast


def _as_text(leaf: Any) -> str:
    return (
        f"{str(leaf[1]).removeprefix('torch.')}{list(leaf[0])}"
        if isinstance(leaf[0], torch.Size)
        else str(leaf[1])[:80]
    )


class Caller:
    """Reads the calls of one model: an argument is the same whether it comes by name or by position."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.name = type(model).__name__
        self.by_position = 0  # number of arguments that were positional: a `loss=` takes them so
        self.modules = list(model.modules())
        self.parameters = list(model.parameters())
        self.attributes = Attributes(self.modules)
        self.is_at_rest = False  # whether nobody changes the modules' attributes
        try:
            self.signature: inspect.Signature | None = inspect.signature(model.forward)
        except (TypeError, ValueError):
            self.signature = None

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], pytree.TreeSpec]:
        """Leaves of a call's arguments, in the order of their names, and their structure."""
        if self.signature is None:
            return pytree.tree_flatten((args, {k: kwargs[k] for k in sorted(kwargs)}))
        try:
            named = self.signature.bind(*args, **kwargs).arguments
        except TypeError as e:
            raise BadInput(
                f"{self.name}.forward does not take these inputs: {e}",
                seen=f"forward{self.signature}",
                advice="the arguments of the model's own forward",
            ) from e
        learn_dataclasses(named)
        for name in named:
            if self.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                named[name] = dict(sorted(named[name].items()))
        return pytree.tree_flatten(dict(sorted(named.items())))

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        """Inside the block nobody changes the modules' attributes, which are looked at once for all calls."""
        self.attributes.state()
        self.is_at_rest = True
        try:
            yield
        finally:
            self.is_at_rest = False

    def call(self, leaves: Sequence[Any], structure: pytree.TreeSpec) -> Call:
        """The call that has these leaves.

        The first `by_position` arguments are positional; others go by name, unless a later argument can only be
        positional.
        """
        given = pytree.tree_unflatten(list(leaves), structure)
        if self.signature is None:
            return Call(*given)
        kinds = {name: parameter.kind for name, parameter in self.signature.parameters.items()}
        if any(kinds[name] in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY) for name in given):
            bound = inspect.BoundArguments(self.signature, OrderedDict(given))
            return Call(bound.args, bound.kwargs)
        first = list(itertools.takewhile(given.__contains__, list(kinds)[: self.by_position]))
        placed = tuple([given.pop(name) for name in first])
        named: dict[str, Any] = {}
        for name, value in given.items():
            named |= value if kinds[name] is inspect.Parameter.VAR_KEYWORD else {name: value}
        return Call(placed, named)

    def situation(self, leaves: Sequence[Any], structure: pytree.TreeSpec) -> Situation:
        """Situation of a call as things are now."""
        grad = torch.is_grad_enabled()
        seen: list[tuple[Any, ...]] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                lies = (leaf.placements,) if isinstance(leaf, DTensor) else ()
                seen.append((leaf.shape, leaf.dtype, grad and leaf.requires_grad, *lies))
            else:
                seen.append(_said(leaf))
        kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        return Situation(
            tuple(seen),
            structure,
            tuple([m.training for m in self.modules]),
            tuple([p.requires_grad for p in self.parameters]),
            tuple([(kind, torch.get_autocast_dtype(kind)) for kind in kinds]),
            self.attributes.latest if self.is_at_rest else self.attributes.state(),
        )

    def differs(self, now: Situation, before: Situation, sight: Sight) -> dict[str, str]:
        """The differences of the present situation from an earlier one, by name, and how each is now.

        `sight` is what the earlier program depends on.
        """
        said = dict[str, str]()
        if now.structure != before.structure or len(now.leaves) != len(before.leaves):
            said["arguments"] = ""
        elif now.leaves != before.leaves:
            pairs = zip(now.leaves, before.leaves, strict=True)
            said |= dict.fromkeys(sorted({_as_text(mine) for mine, theirs in pairs if mine != theirs}), "")
        if now.modes != before.modes:
            paths = (path for path, _ in self.model.named_modules())
            said["train and eval"] = _switched(paths, now.modes, before.modes, ("in eval", "in train"))
        if now.trained != before.trained:
            paths = (path for path, _ in self.model.named_parameters())
            said["parameters that train"] = _switched(paths, now.trained, before.trained, ("frozen", "trained"))
        if now.autocast != before.autocast:
            kinds = [f"{str(dtype).removeprefix('torch.')} on {kind}" for kind, dtype in now.autocast]
            said["autocast"] = ", ".join(kinds) or "off"
        if now.said != before.said and (changed := self.attributes.changed(sight)):
            said["attributes or hooks of modules"] = _some(changed)
        return said

    def names(self, structure: pytree.TreeSpec) -> list[str]:
        """Names of the leaves of a call: argument, and path inside it."""
        tree = pytree.tree_unflatten([0] * structure.num_leaves, structure)
        return [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(tree)[0]]

    def places(self, graph: Graph) -> list[int]:
        """Index among the leaves of a call for each input of a graph."""
        args, kwargs = pytree.tree_unflatten(list(range(graph.input_spec.num_leaves)), graph.input_spec)
        order = self.arguments(args, kwargs)[0]
        at = {leaf: order.index(i) for i, leaf in enumerate(graph.input_leaves) if isinstance(leaf, str)}
        return [at[str(node.target)] for node in graph.inputs.values()]


def _switched(paths: Iterable[str], now: Sequence[bool], before: Sequence[bool], words: tuple[str, str]) -> str:
    """Text that names what was switched off or on, without modules inside of one that was."""
    switched: dict[bool, list[str]] = {False: [], True: []}
    for path, mine, theirs in zip(paths, now, before, strict=True):
        above = path.split(".")[:-1]
        inside = ("", *itertools.accumulate(above, "{}.{}".format)) if path else ()
        if mine != theirs and not any(outer in switched[mine] for outer in inside):
            switched[mine].append(path)
    return _some([f"{path or 'the model'} is {words[on]}" for on, some in switched.items() for path in some])


def _some(texts: Sequence[str]) -> str:
    """A few of the texts, and how many more there are."""
    more = len(texts) - LIMITS.named
    return ", ".join([*texts[: LIMITS.named], f"and {more} more" if more > 0 else ""]).removesuffix(", ")


def _said(value: Any) -> tuple[type, Any]:
    """A constant argument as a type and text, as the caller may change the object later.

    By this 1, 1.0 and True differ, and nan equals itself.
    """
    if isinstance(value, _SAID):
        return type(value), repr(value)
    try:
        return type(value), pickle.dumps(value)
    except Exception as e:
        raise BadInput(
            f"an argument is a {type(value).__name__}, of which cannot be said whether it is the same in the next call",
            seen=f"{type(e).__name__}: {e}",
            advice="tensors, numbers, text, and what can be pickled",
        ) from e

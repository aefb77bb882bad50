"""Names of a module's tensors, by the id of the fake that stands for each."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.graph.held import plain_tensors


class Names:
    """Names and kinds of a module's tensors, and all names that plans use."""

    def __init__(self) -> None:
        self.of: dict[int, tuple[str, ...]] = {}  # id(fake) -> all names of its tensor
        self.kinds: dict[int, str] = {}  # id(fake) -> "parameter" or "buffer"
        self.taken: set[str] = set()  # names that plans know
        self.fakes: list[Tensor] = []  # one for each tensor of the module
        self.sharing: set[int] = set()  # ids of the fakes whose memory has another name
        self.fake_of: dict[int, Tensor] = {}  # id(tensor of the module) -> the fake that stands for it

    def learn(self, root: torch.nn.Module, fakes: list[Tensor]) -> None:
        """Learn every name of every tensor that the module holds."""
        named = [("parameter", n, p) for n, p in root.named_parameters(remove_duplicate=False)]
        named += [("buffer", n, b) for n, b in root.named_buffers(remove_duplicate=False)]
        for path, module in root.named_modules():  # a plain attribute is a buffer too
            named += [("buffer", ".".join(filter(None, (path, *at))), t) for at, t in plain_tensors(module)]
        for kind, name, tensor in named:
            self.of[id(tensor)] = (*self.of.get(id(tensor), ()), name)
            self.kinds.setdefault(id(tensor), kind)
        self.fakes = fakes
        self.taken = {name for names in self.of.values() for name in names}

    def apart(self, kind: str, name: str, prefix: str = "") -> str:
        """A name of an input or output that no other tensor has in plans: "input mask" beside buffer "mask"."""
        while prefix + name in self.taken:
            name = f"{kind} {name}"
        self.taken.add(prefix + name)
        return name

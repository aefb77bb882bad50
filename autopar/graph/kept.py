"""`NotKept` stands for a tensor that a step does not keep; reading it raises a letter that says how to get it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from torch.utils import _pytree as pytree

from autopar.letters import NotServed


@dataclass(frozen=True)
class NotKept:
    """A stand-in for an output that is made a few rows at a time, or for an attribute that forward sets."""

    name: str
    is_attribute: bool = False

    def __repr__(self) -> str:
        return f"<{self.name}, not kept>"

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # a question of Python's own
            raise AttributeError(attribute)
        self._refuse()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        leaves = pytree.tree_leaves((args, kwargs))
        next(leaf for leaf in leaves if isinstance(leaf, NotKept))._refuse()

    def _refuse(self, *_: Any) -> NoReturn:
        if self.is_attribute:
            raise NotServed(
                f"forward sets the attribute {self.name} to a tensor, which a parallel model does not keep",
                advice="an output of forward; or a registered buffer, where it needs no gradient",
            )
        raise NotServed(
            f"the output {self.name} was made a few rows at a time, and was not kept",
            advice='outputs="full", which keeps all of it; or a call under torch.no_grad()',
        )

    __getitem__ = __len__ = __iter__ = __float__ = __bool__ = __array__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __matmul__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __abs__ = _refuse

"""What calls of attention that describe their masks have in common: their arguments, and the op that they become."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autopar.letters import NotServed
from autopar.ops.attention import attend
from autopar.ops.entry import same
from autopar.runtime.sees import Sees
from autopar.tracer.place import source

if TYPE_CHECKING:
    from autopar.tracer.recorder import Recorder


class Given:
    """The arguments of a call, by name, with the function's defaults."""

    def __init__(self, original: Callable[..., Any], signature: inspect.Signature, arguments: dict[str, Any]) -> None:
        self.original = original
        self.name = original.__name__
        self.signature = signature
        self.arguments = arguments

    def several(self, *names: str) -> list[Any]:
        return [self.arguments[name] for name in names]

    def first(self, *names: str) -> Any:
        """The argument with one of these names; None where the function has none of them."""
        return next((self.arguments[name] for name in names if name in self.arguments), None)

    def first_three(self) -> list[Tensor]:
        """Queries, keys and values, by whatever names."""
        return list(self.arguments.values())[:3]

    def refuse_others(self, served: Collection[str]) -> None:
        """Refuse arguments that are not served, unless they have their defaults."""
        for name, value in self.arguments.items():
            default = self.signature.parameters[name].default
            if name not in served and not same(value, default):
                raise NotServed(
                    f"{self.name} is called with {name}={value}, which the op of attention does not have",
                    at=source(),
                    advice=f"without {name}",
                )

    def sees(self, *served: str) -> Sees:
        """The mask and the scores of a call of flash attention; it may have these arguments besides."""
        known = ("scale", "softmax_scale", "causal", "window_size", "softcap", "deterministic")
        lengths = ("max_q", "max_k", "max_seqlen_q", "max_seqlen_k")
        self.refuse_others((*tuple(self.arguments)[:3], *known, *lengths, *served))
        left, right = (None if n in (-1, None) else n for n in self.first("window_size") or (None, None))
        if self.first("causal"):
            right = 0
        return Sees(left, right, None, self.first("softcap") or None, self.first("scale", "softmax_scale"))


class Described:
    """Attention with descriptions in one capture."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._made: dict[Any, Tensor] = {}

    def close(self) -> None:
        """Release what was made."""
        self._made.clear()

    def read(self, answer: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        """A function that answers the calls of the captured model, and leaves all others to the original."""
        signature = inspect.signature(original)

        def answers(*args: Any, **kwargs: Any) -> Any:
            if not self.recorder.place.is_in_model() or self.recorder.call.function is not None:
                return original(*args, **kwargs)
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as e:
                raise NotServed(f"{original.__name__} is called as it does not take: {e}", at=source()) from e
            bound.apply_defaults()
            return answer(Given(original, signature, bound.arguments))

        return answers

    def once(self, about: Any, make: Callable[[], Tensor]) -> Tensor:
        """Compute a tensor by `make`, once for all layers that ask for the same; each checkpoint has its own."""
        place = self.recorder.place
        key = (*place.regions, about)
        if key not in self._made:
            with place.within(""):
                self._made[key] = make()
        return self._made[key]

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sees: Sees,
        documents: Tensor | None = None,
        counts: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """The op, under autocast on operands of its dtype, as these functions cast them."""
        if not self.recorder.casts.on():
            return attend(query, key, value, documents, counts, sinks, sees.text())
        dtype = torch.get_autocast_dtype("cpu")
        given = [x if x.dtype == torch.float64 else x.to(dtype) for x in (query, key, value)]
        with torch.autocast("cpu", enabled=False):
            return attend(given[0], given[1], given[2], documents, counts, sinks, sees.text())


def check_shapes(query: Tensor, key: Tensor, value: Tensor, is_grouped: bool) -> None:
    """Refuse shapes that these functions refuse, or repeat without being told to."""
    heads = query.shape[1]
    groups = key.shape[1]
    is_served = query.dim() == key.dim() == value.dim() == 4 and key.shape[:3] == value.shape[:3]
    is_served = is_served and query.shape[0] == key.shape[0] and query.shape[-1] == key.shape[-1]
    if not is_served or (heads % groups if is_grouped else heads != groups):
        shapes = ", ".join(str(list(x.shape)) for x in (query, key, value))
        raise NotServed(
            f"attention of a query, a key and a value of shapes {shapes}",
            at=source(),
            advice="one batch, as many heads of keys as of values, and enable_gqa=True where queries have more",
        )

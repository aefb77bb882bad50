"""Turn a call of a torch function into a canonical op with arguments by name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.ops.entry import FILLED, OPS, SHAPE, SIZES, SPELLINGS, TRANSLATED, Apply, OnACopy, Op, facts_of, same
from autopar.runtime.private import ATEN_OPS, FUNCTIONS_OF_C, OpOverload

_T = Tensor
_LAYOUT = frozenset(
    {"how", "memory_format", "non_blocking", "copy", "sparse_grad", "_stacklevel", "inplace", "out"}
)  # layout, device and warnings: they change no value
_MAKERS = frozenset(
    "arange as_tensor asarray bartlett_window blackman_window complex empty empty_strided eye full hamming_window "
    "hann_window kaiser_window linspace logspace normal ones rand randint randn "
    "randperm scalar_tensor tensor tril_indices triu_indices vander zeros fftfreq rfftfreq poisson polar".split()
)  # functions without a tensor operand, which nobody can override
_OPERATORS = {
    "truediv": "div",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "mod": "remainder",
    "floordiv": "floor_divide",
}  # Python's name of an operator, and torch's of its function
_HOMES = {
    "special": torch.special,
    "linalg": torch.linalg,
    "fft": torch.fft,
}  # ATen's prefix, and where torch keeps the rest of the name


def lookup(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any = None
) -> tuple[Op, dict[str, Any]]:
    """The canonical op of a call, and its arguments by name; shapes and dtypes are those of the result."""
    if function not in TRANSLATED and isinstance(function, OpOverload):
        function = _of_aten(function)
    if getattr(function, "__name__", "") == "__get__":
        return _attribute(function.__self__.__name__, args[0])  # type: ignore[attr-defined]
    if function in TRANSLATED:
        read = TRANSLATED[function](args, kwargs, result)
        if isinstance(read, tuple):
            return read
        function = read or function
    canonical, arguments = _lookup(function, args, kwargs, result)
    if canonical.signature is None:
        return canonical, arguments
    if arguments.get("dim", 0) in ((), []):  # sum over no dims is torch's word for all
        del arguments["dim"]
    for many in ("dims", "repeats"):  # permute((0, 2, 1)) and permute(0, 2, 1)
        said = arguments.get(many)
        if isinstance(said, tuple) and len(said) == 1 and isinstance(said[0], (tuple, list)):
            arguments[many] = tuple(said[0])
    if (sizes := _local(canonical, SIZES)) is not None:
        arguments[sizes] = tuple(part.shape[arguments.get("dim", 0)] for part in result)
    settle = facts_of(canonical.name).settle
    return settle(canonical, arguments, result) if settle else (canonical, arguments)


def functional(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Op | None, dict[str, Any]]:
    """The pure form of a call that writes to its first argument.

    The op is None where `source` is the new value.
    """
    name = getattr(function, "__name__", "")
    if isinstance(function, OpOverload):
        name = function._schema.name.split("::")[1]
    if name in ("__setitem__", "copy_", "fill_", "zero_"):
        return _stored(name, *args, *kwargs.values())
    if name == "bernoulli_":
        return OPS["bernoulli"], {"input": args[0], "p": args[1] if len(args) > 1 else kwargs.get("p", 0.5)}
    if name in FILLED:
        return _filled(name, args, kwargs)
    pure = _pure_function(function, name)
    if pure is None:
        return by_own_name(OnACopy(function), args, kwargs)
    kwargs = {k: v for k, v in kwargs.items() if k != "inplace"}
    if pure is function:  # inplace by position
        named = function.__code__.co_varnames[: function.__code__.co_argcount]
        args = tuple(False if n == "inplace" else a for n, a in zip(named, args, strict=False))
    return lookup(pure, args, kwargs, args[0] if args else kwargs.get("input"))


def _stored(name: str, target: Tensor, *given: Any) -> tuple[Op | None, dict[str, Any]]:
    """The pure form of a call that overwrites a tensor, whatever it held."""
    if name == "__setitem__":
        return OPS["setitem"], {"input": target, "index": given[0], "value": given[1]}
    if name in ("copy_", "fill_") and isinstance(given[0], Tensor):
        return None, {"source": given[0]}
    return OPS["full_like"], {"input": target, "fill_value": 0 if name == "zero_" else given[0]}


def _filled(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Op, dict[str, Any]]:
    """The op that makes the draws with which a method fills a tensor."""
    made, names = FILLED[name]
    said = {**dict(zip(names, args[1:], strict=False)), **kwargs}
    if name == "random_" and "from" not in said and "to" in said:
        said = {"from": said["to"]}  # one number alone is the end
    numbers = {letter: said[n] for letter, n in zip("ab", names, strict=False) if n in said}
    return OPS[made], {"input": args[0], **numbers}


def _pure_function(function: Callable[..., Any], name: str) -> Callable[..., Any] | None:
    """The function that computes what another writes; None where torch has none."""
    if isinstance(function, OpOverload):
        packet = getattr(torch.ops.aten, name[:-1], None)
        if packet is not None and function._overloadname in packet.overloads():
            return cast(Callable[..., Any], getattr(packet, function._overloadname))
    if not name.endswith("_"):
        return function
    bare = name[3:-2] if name.startswith("__i") else name.rstrip("_")
    bare = _OPERATORS.get(bare, bare)
    return next(filter(callable, (getattr(home, bare, None) for home in (_T, torch, F))), None)


@functools.cache
def _of_aten(function: Any) -> Any:
    """The torch function of the same name as an ATen op, or the ATen op itself."""
    space, name = function._schema.name.split("::")
    if space == "aten":
        name = {"_unsafe_view": "view", "_softmax": "", "slice": ""}.get(name, name)
        prefix, _, rest = name.partition("_")
        homes = [(torch, name), (_T, name), (F, name), (_HOMES.get(prefix), rest)]
        for home, its_name in homes:
            if getattr(home, its_name, None) in SPELLINGS:
                return getattr(home, its_name)
    return function


def _attribute(name: str, tensor: Tensor) -> tuple[Op, dict[str, Any]]:
    """The op of a tensor attribute: x.T, x.mT, x.data."""
    if name in ("T", "mT", "H", "mH") and not tensor.is_complex():
        dims = tuple(range(tensor.dim()))
        return OPS["permute"], {
            "input": tensor,
            "dims": dims[::-1] if name in ("T", "H") else (*dims[:-2], *dims[:-3:-1]),
        }
    if name == "data":
        return OPS["detach"], {"input": tensor}
    if name in ("real", "imag"):
        return by_own_name(getattr(torch, name), (tensor,), {})
    raise KeyError(name)


_local = functools.cache(Op.local)


def _lookup(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> tuple[Op, dict[str, Any]]:
    found = SPELLINGS.get(function)
    if found is not None:
        canonical, spelled = found
        try:
            named = _named(spelled, args, kwargs)
        except TypeError:  # an overload that the line does not cover
            return by_own_name(function, args, kwargs)
        assert canonical.signature is not None
        names = canonical.signature.parameters
        if (shape := _local(canonical, SHAPE)) is not None:  # whatever was said, the shape of the result says it all
            return canonical, {
                n: tuple(result.shape) if n == shape else named[n] for n in names if n == shape or n in named
            }
        if canonical.name == "arange":
            return _arange(canonical, named)
        if any(_holds_tensor(v) for n, v in named.items() if n in names and names[n].annotation is not Tensor):
            return by_own_name(function, args, kwargs)  # a tensor where the line has a number
        if all(n in names or n in _LAYOUT or same(v, spelled.parameters[n].default) for n, v in named.items()):
            return canonical, {n: v for n, p in names.items() if n in named and not same(v := named[n], p.default)}
    return by_own_name(function, args, kwargs)


def _holds_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, (tuple, list)) and any(isinstance(v, Tensor) for v in value))


@functools.cache
def _plain_names(signature: inspect.Signature) -> tuple[tuple[str, ...], frozenset[str]] | None:
    """Positional names and required names of a signature; None where it has * or **."""
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in signature.parameters.values()):
        return None
    return tuple(n for n, p in signature.parameters.items() if p.kind == p.POSITIONAL_OR_KEYWORD), frozenset(
        n for n, p in signature.parameters.items() if p.default is p.empty
    )


def _named(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name, as `signature.bind` gives them, at a tenth of its time."""
    plain = _plain_names(signature)
    if plain is None:
        bound = signature.bind(*args, **kwargs).arguments
        return {**{p.name: () for p in signature.parameters.values() if p.kind == p.VAR_POSITIONAL}, **bound}
    positional, needed = plain
    named = dict(zip(positional, args, strict=False))
    if (
        len(args) > len(positional)
        or any(n in named or n not in signature.parameters for n in kwargs)
        or not needed <= named.keys() | kwargs.keys()
    ):
        raise TypeError("another overload")
    named.update(kwargs)
    return named


def _arange(canonical: Op, named: dict[str, Any]) -> tuple[Op, dict[str, Any]]:
    bounds = list(named.get("bounds", ()))
    how = named.get("how", {})
    if len(bounds) == 1 and "end" not in how:
        bounds = [0, *bounds]
    start = bounds[0] if bounds else how.get("start", 0)
    end = bounds[1] if len(bounds) > 1 else how["end"]
    step = bounds[2] if len(bounds) > 2 else how.get("step", 1)
    return canonical, {"start": start, "end": end, **({"step": step} if step != 1 else {})}


def by_own_name(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Op, dict[str, Any]]:
    """The op of a call that no entry covers, under the function's own name, distinct from entries' names."""
    name = own_name(function)
    if name in OPS:
        name += "'"
    made = Op(name, function)
    # fakes say cpu; the program runs where the model is
    said = {k: v for k, v in kwargs.items() if k != "device" and not (k == "out" and v is None)}
    return made, made.bind(args, said)


def own_name(function: Callable[..., Any]) -> str:
    """`cumsum`, `nn.functional.gumbel_softmax`, `ops.mylib.foo.default`, `function models.Scale`."""
    if isinstance(function, (Apply, OnACopy)):
        return function.__name__
    if isinstance(function, ATEN_OPS):
        return f"ops.{str(function).replace('::', '.')}"
    known = _names_of_torch_functions().get(function)
    return known if known is not None else getattr(function, "__qualname__", repr(function))


@functools.cache
def _names_of_torch_functions() -> dict[Callable[..., Any], str]:
    """The first name of each function of torch."""
    found: dict[Callable[..., Any], str] = {}
    for name, function in torch_functions().items():
        found.setdefault(function, name)
    return found


@functools.cache
def torch_functions() -> dict[str, Callable[..., Any]]:
    """Every function of torch that a tracer meets, by the name that a graph gives it."""
    found: dict[str, Callable[..., Any]] = {}
    homes = {
        "": torch,
        "Tensor.": _T,
        "nn.functional.": F,
        "linalg.": torch.linalg,
        "fft.": torch.fft,
        "special.": torch.special,
        **FUNCTIONS_OF_C,
    }
    overridable = {
        f for functions in torch.overrides.get_overridable_functions().values() for f in functions if callable(f)
    }
    names = {getattr(f, "__name__", "") for f in overridable}
    for prefix, home in homes.items():
        for name in dir(home):
            function = getattr(home, name)
            if (
                callable(function)
                and not isinstance(function, type)
                and (
                    function in overridable or name in _MAKERS or prefix == "nn." or (prefix == "C." and name in names)
                )
            ):
                found[prefix + name] = function
    return found

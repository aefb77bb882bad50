"""Every function of torch, called as torch's own tests call it, and every strategy that plans may take of it.

torch's table of operators (`op_db`) knows some 700 functions with some 19,000 calls: unbatched, without dims, empty,
with either value of each flag. Each call is traced as a model of its own; every op of its graph then runs on parts
under every choice that the space holds, and must give what the whole op gives, with its gradients. Where values may be
drawn, they are drawn again with what breaks rules that look right: ties, zeros, ones, infinities, NaN.

    python -m tests.ops.audit 3           # three calls of each function: what is wrong, raw, and without a rule
"""

from __future__ import annotations

import collections
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.fx import map_arg
from torch.utils import _pytree as pytree

from autopar import Cluster, DeviceMesh
from autopar.graph.graph import info, op_name, run, typed
from autopar.letters import Letter
from autopar.ops.entry import rule_of
from autopar.space.setting import Setting
from autopar.space.shardings import shardings
from autopar.tracer import ColoTracer
from tests.ops.proof import prove

TENSOR = "@tensor"
GENERIC = Cluster.of("generic")
# What a graph cannot hold, needs another device, or is undefined by torch's own word.
OUTSIDE = ("jiterator", "sparse", "empty", "_scaled_mm", "to_sparse", "resize", "as_strided", "chalf")


class Call(nn.Module):
    """One function, with a tensor for each place in its arguments."""

    def __init__(self, function, arguments):
        super().__init__()
        self.function, self.arguments = function, arguments

    def forward(self, *tensors):
        waiting = iter(tensors)
        args, kwargs = pytree.tree_map_only(str, lambda v: next(waiting) if v == TENSOR else v, self.arguments)
        return self.function(*args, **kwargs)


@dataclass
class Findings:
    """What an audit has seen, by what it is about."""

    calls: int = 0
    proven: int = 0
    functions: dict = field(
        default_factory=lambda: collections.defaultdict(set)
    )  # name -> were all of its ops under a rule?
    without_rule: dict = field(default_factory=lambda: collections.defaultdict(set))  # op -> functions that came to it
    letters: dict = field(default_factory=dict)
    raw: dict = field(default_factory=dict)
    wrong: dict = field(default_factory=dict)


def table():
    """torch's table of operators. Importing it takes seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db

    return [o for o in op_db if not any(word in o.name for word in OUTSIDE)]


def calls_of(entry, most: int, first: int = 0) -> Iterator[tuple[tuple, dict]]:
    """Some calls of a function, spread over all that the table has."""
    dtype = next((d for d in (torch.float64, torch.int64, torch.bool) if d in entry.dtypes), None)
    if dtype is None:
        return
    torch.manual_seed(0)
    samples = list(entry.sample_inputs("cpu", dtype, requires_grad=entry.supports_autograd and dtype == torch.float64))
    step = max(1, len(samples) // most)
    for sample in samples[first % step :: step][:most]:
        yield (sample.input, *sample.args), sample.kwargs


def audit(entries, most: int, first: int = 0, found: Findings | None = None) -> Findings:
    """Trace these calls, and prove every choice of every op of their graphs."""
    found = found or Findings()
    for entry in entries:
        for arguments in calls_of(entry, most, first):
            tensors = [t for t in pytree.tree_leaves(arguments) if isinstance(t, torch.Tensor)]
            if any(t.layout is not torch.strided for t in tensors) or any(
                isinstance(v, str) and v == TENSOR for v in pytree.tree_leaves(arguments)
            ):
                continue
            model = Call(entry.op, pytree.tree_map_only(torch.Tensor, lambda t: TENSOR, arguments))
            try:
                graph = ColoTracer().trace(model, tuple(tensors))
            except Letter as letter:
                found.letters[f"{entry.name}: {letter.what}"[:160]] = str(letter)
                continue
            except Exception as e:
                found.raw[f"tracing {entry.name}: {type(e).__name__}: {e}"[:200]] = entry.name
                continue
            found.calls += 1
            _compare(entry.name, model, graph, tensors, found)
            _prove(entry.name, graph, tensors, found)
    return found


def _compare(name: str, model: Call, graph, tensors, found: Findings) -> None:
    """The graph computes what the function computes, gradients too, on its own numbers and on odd ones."""
    if graph.is_random or "empty" in name:
        return
    replay = graph.module(model)
    for given in (tensors, with_numbers(tuple(tensors), FINITE) if "grid_sample" not in name else None):
        try:
            expected = _with_gradients(model, given) if given is not None else None
        except Exception:  # the function does not take these numbers
            expected = None
        if expected is None:
            continue
        try:
            torch.testing.assert_close(_with_gradients(replay, given), expected, equal_nan=True, rtol=1e-7, atol=1e-7)
        except Exception as e:
            found.wrong[f"the graph of {name}: {type(e).__name__}: {e}"[:300]] = name
            return


def _with_gradients(function, tensors):
    given = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    outputs = _tensors(function(*given))
    wanted, trained = [o for o in outputs if o.requires_grad], [t for t in given if t.requires_grad]
    gradients = (
        torch.autograd.grad(wanted, trained, [torch.ones_like(o) for o in wanted], materialize_grads=True)
        if wanted and trained
        else ()
    )
    return [o.detach() for o in outputs], list(gradients)


def _prove(name: str, graph, tensors, found: Findings) -> None:
    try:
        spaces = {n: {s.name: s for s in shardings(graph, Setting(DeviceMesh((n,)), GENERIC)).sites} for n in (2, 3)}
    except Exception as e:
        found.raw[f"the space of {name}: {type(e).__name__}: {e}"[:200]] = name
        return
    values, given, all_ruled = {}, iter(tensors), True
    for node in graph.nodes:
        about = info(node)
        if about.kind == "input":
            values[node] = next(given)
        elif about.kind == "part":
            values[node] = values[node.args[0]][node.args[1]]
        elif about.kind == "op":
            arguments = map_arg(node.kwargs, lambda n: values[n])
            try:
                values[node] = run(node, values)
            except Exception as e:  # the op itself does not run on these
                found.letters[f"{name}: {op_name(node)} does not run: {e}"[:160]] = name
                return
            if not spaces[2][about.key].has_rule:
                found.without_rule[op_name(node)].add(name)
                all_ruled = False
                for choice in spaces[2][about.key].choices:
                    if any(not f.value.is_replicated for s in choice.strategies for f in (*s.operands, *s.outputs)):
                        found.wrong[f"{op_name(node)} in {name} is cut without a rule: {choice}"] = name
            elif about.random < 0:
                arguments = pytree.tree_map_only(
                    torch.Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), dict(arguments)
                )
                _prove_op(name, node, arguments, spaces, found)
    found.functions[name].add(all_ruled)


def _prove_op(name: str, node, arguments, spaces, found: Findings) -> None:
    rule = rule_of(op_name(node), {**typed(node.kwargs), "outputs": info(node).outputs})
    if rule is None:  # it has no tensor operands: a literal
        return
    with_form = rule.masked | rule.inside | (rule.made if op_name(node) == "arange" else frozenset())
    if op_name(node).startswith("empty"):  # what it holds is nobody's claim
        return
    draws = [(arguments, False)]
    for numbers in (FINITE, INFINITE) if op_name(node) not in READ_AS_PLACES else ():
        drawn = with_numbers(arguments, numbers)
        if drawn is not None and (finite := _is_finite(node.target, drawn)) is not None:
            if not finite:  # there torch's own gradients depend on how numbers lie in memory
                drawn = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, drawn)
            draws.append((drawn, not finite))
    for n, sites in spaces.items():
        for choice in sites[info(node).key].choices:
            strategy = choice.strategies[0]
            if strategy.cut is not None and with_form & set(strategy.cut.factors):
                continue  # a local form computes it: tests of forms run those on ranks
            floats = [t.is_floating_point() for t in _tensors(arguments)]
            if any(f.value.is_partial and not is_float for f, is_float in zip(strategy.operands, floats)):
                continue  # truth values are parts of a sum on one device alone
            for values, is_infinite in draws:
                if is_infinite and (
                    "P" in repr(strategy) or "polynomial" in op_name(node)
                ):  # parts of a sum of infinities are no numbers
                    continue
                try:
                    prove(op_name(node), values, strategy, n)
                    found.proven += 1
                except Exception as e:
                    found.wrong[
                        f"{op_name(node)} in {name}, {n} devices: {strategy}: {type(e).__name__}: {e}"[:300]
                    ] = name


READ_AS_PLACES = (
    "grid_sample",
    "grid_sampler_2d",
    "grid_sampler_3d",
)  # torch itself reads outside its memory at such coordinates
FINITE = (0.0, 1.0, -1.0, 0.0, 2.0, 1.0, -100.0, 1e5, 0.5)
INFINITE = (*FINITE, torch.inf, torch.nan, -torch.inf)


def _is_finite(op, arguments) -> bool | None:
    """Are the results and gradients finite? None where the op does not take these numbers.

    Probabilities, say, lie between 0 and 1.
    """
    try:
        result = op.run(arguments)
        outputs = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        wanted, given = ([t for t in side if t.requires_grad] for side in (outputs, _tensors(arguments)))
        gradients = (
            torch.autograd.grad(wanted, given, [torch.ones_like(t) for t in wanted], allow_unused=True)
            if wanted and given
            else ()
        )
    except Exception:
        return None
    return all(
        bool(torch.isfinite(t).all())
        for t in (*outputs, *_tensors(arguments), *gradients)
        if t is not None and t.is_floating_point()
    )


def _tensors(value):
    return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def with_numbers(arguments, numbers):
    """The same call on these numbers, in ties; nothing where no number is free."""
    generator = torch.Generator().manual_seed(1)
    pool = torch.tensor(numbers, dtype=torch.float64)

    def drawn(t):
        if not t.is_floating_point() or t.dtype.itemsize < 4:
            return t
        picked = pool[torch.randint(0, len(pool), t.shape, generator=generator)].to(t.dtype)
        return picked.requires_grad_(t.requires_grad)

    if not any(isinstance(t, torch.Tensor) and t.is_floating_point() for t in pytree.tree_leaves(arguments)):
        return None
    return pytree.tree_map_only(torch.Tensor, drawn, arguments)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    only = sys.argv[2].split(",") if len(sys.argv) > 2 else None
    found = audit([e for e in table() if only is None or e.name in only], int(sys.argv[1]))
    print(
        f"{found.calls} calls of {len(found.functions)} functions, "
        f"{sum(v == {True} for v in found.functions.values())} of them under rules throughout; {found.proven} "
        "strategies proven"
    )
    for title in ("without_rule", "letters", "raw", "wrong"):
        print(f"\n{title}: {len(getattr(found, title))}")
        for key in sorted(getattr(found, title)):
            print("   ", key.replace("\n", " ")[:220])


if __name__ == "__main__":
    main()

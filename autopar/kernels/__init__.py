"""Hot ops in one fused kernel each: Triton on a GPU, behind torch custom ops.

A family is one file: the ops that it stands for, as patterns; its reference, which runs those ops; the Triton kernels;
and two functions that launch them, of which `custom_ops.py` makes custom ops. Groups of such ops are found in a graph
once; `space/kernel_sites.py` says which of them a plan fuses, and `codegen/local_passes.py` puts the kernel in their
place, after sharding and before differentiation.

    add_rms_norm  a sum and its RMS norm: both are results
    rms_norm      an RMS norm with a weight
    add_layer_norm  a sum and its layer norm: both are results
    layer_norm    a layer norm with weight and bias
    dropout       a dropout by position, and the sum that follows it
    masked_softmax  a softmax of scores that are scaled, capped and masked
    gated         silu(gate) * up, or a gelu of the gate
    bias_gelu     a gelu behind a product, and the gradient of that product's bias
    gelu_tanh     a gelu that is written out with a tanh
    rotary_pair   a rotary embedding of queries and keys, by the same angles
    rotary        a rotary embedding of one of them
    cross_entropy a summed cross entropy of rows of logits, which are read in half precision
    cross_entropy_part  the same where the vocabulary is cut

    slot_sums.py  no family: sums of the results of a row's experts, as draws.py are random bits
    backend.py    what runs: a GPU, the interpreter, or the reference
    patterns.py   finds a piece of a program in another
    custom_ops.py  custom ops for forward and backward, and what autograd keeps between them
    family.py     ops that a kernel stands for, and when it serves them
    buffer_reuse.py  ops that write a gradient over the value that it belongs to
    rows.py       launches of kernels that take a row per program
    timing.py     times of a family beside those of the ops that it stands for
    measured.py   which families were faster on a device: what `kernels=True` takes
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch.fx as fx

    from autopar.kernels.family import Family
    from autopar.kernels.patterns import Match

    Place: TypeAlias = tuple[Family, tuple[Match, ...]]  # groups with one last result, largest first
    Group: TypeAlias = tuple[Family, Match]

# a larger group before what is a part of it
NAMES = (
    "add_rms_norm",
    "rms_norm",
    "add_layer_norm",
    "layer_norm",
    "dropout",
    "masked_softmax",
    "gated",
    "bias_gelu",
    "gelu_tanh",
    "rotary_pair",
    "rotary",
    "cross_entropy",
    "cross_entropy_part",
)


def can_run() -> bool:
    """Whether Triton is installed, which runs kernels on a GPU."""
    return importlib.util.find_spec("triton") is not None


def places(nodes: Iterable[fx.Node], names: Collection[str]) -> tuple[Place, ...]:
    """The places of a graph where kernels can replace ops: larger families first, last nodes first."""
    calls = [node for node in nodes if node.op == "call_function"]
    found = ((family, tuple(family.in_graph(node))) for family in families(names) for node in reversed(calls))
    return tuple(place for place in found if place[1])


def groups(
    places: Iterable[Place], stands: Callable[[Family, Match], bool] = lambda family, found: True
) -> Iterator[Group]:
    """The groups of ops that kernels replace, among those that stand.

    No op is in two groups. The ops of a group that does not stand may be in smaller ones.
    """
    taken = set[Any]()
    for family, several in places:
        found = next((one for one in several if stands(family, one)), None)
        if found is not None and taken.isdisjoint(found.nodes):
            taken.update(found.nodes)
            yield family, found


def of_one_result(names: Collection[str]) -> tuple[str, ...]:
    """Families among `names` whose groups have one result each.

    The others reorder ops, and with them the sums of gradients.
    """
    return tuple(family.name for family in families(names) if len(family.patterns[0].results) == 1)


def families(names: Collection[str]) -> Iterable[Family]:
    """The families of these names, largest groups first; imports the modules that run them."""
    for name in NAMES:
        if name in names:
            yield importlib.import_module(f"autopar.kernels.{name}").FAMILY

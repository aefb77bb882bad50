"""Build the `Memory` of a space: the pieces of its sites, then those of its edges."""

from __future__ import annotations

import numpy as np
import torch.fx as fx

from autopar.graph.graph import Graph, info, type_of
from autopar.sharding.costs import optimizer_figures
from autopar.space.conversion_bytes import Temporaries
from autopar.space.edge_pieces import EdgePieces
from autopar.space.gradient_buckets import GradientBuckets, trained_parameters
from autopar.space.handed_on import handed_on
from autopar.space.least_saved import least_saved
from autopar.space.lifetimes import Clock, Lifetimes
from autopar.space.local_bytes import LocalBytes
from autopar.space.memory import Memory, Piece
from autopar.space.op_bytes import OpBytes
from autopar.space.parameter_values import ParameterValues
from autopar.space.passages import passages_of
from autopar.space.schedule import Schedule
from autopar.space.setting import Setting
from autopar.space.shared import Shared
from autopar.space.shown_gradients import shown_gradients
from autopar.space.site_pieces import SitePieces
from autopar.space.traffic import held_by_kernels
from autopar.space.wiring import Wiring


def memory_of(
    graph: Graph,
    setting: Setting,
    wiring: Wiring,
    schedule: Schedule,
    parameters: ParameterValues,
    shared: Shared,
) -> Memory:
    """The memory of a graph's step: all pieces, and what the sums of pieces leave out."""
    bytes_ = shared.bytes
    schedule = schedule.moving(_gathered(wiring, parameters, bytes_))
    trained = trained_parameters(graph)
    lifetimes = _lifetimes(graph, setting, len(trained), parameters, shared)
    clock = lifetimes.clock
    buckets = GradientBuckets.of(trained, lifetimes, schedule, wiring, setting)
    op_bytes = OpBytes(wiring, lifetimes, bytes_, setting.cluster.device.kernels)
    sites = SitePieces(graph, setting, wiring, lifetimes, buckets, bytes_, op_bytes)
    for node in graph.nodes:
        sites.add(node)
    edges = EdgePieces(wiring, schedule, lifetimes, buckets, bytes_)
    for index in range(len(wiring.edges)):
        edges.add(index)
    shown = shown_gradients(wiring, lifetimes, bytes_)
    pieces = (
        *sites.found,
        *edges.found,
        *shown.pieces,
        *_unread(graph, wiring, clock),
        *_rows_out(graph, wiring, clock),
    )
    passages = passages_of(wiring, lifetimes, bytes_, op_bytes)
    temporaries = Temporaries(wiring, lifetimes, schedule, passages, pieces, shared.values, bytes_)
    ops, arrives = tuple(info(n).key for n in clock.ops), passages.arrives
    converted, merged = edges.converted(arrives), edges.gradients.merged(arrives)
    return Memory(
        pieces,
        ops,
        clock.updates,
        passages,
        edges.readers,
        converted,
        edges.viewed,
        merged,
        shown,
        temporaries,
        edges.messages,
        tuple(handed_on(wiring, schedule, lifetimes, edges.found)),
    )


def least_bytes(graph: Graph, setting: Setting, parameters: ParameterValues, shared: Shared) -> float:
    """Bytes that a device holds at least when backward begins, where nothing is recomputed."""
    lifetimes = _lifetimes(graph, setting, len(trained_parameters(graph)), parameters, shared)
    whole = shared.of_graph("least saved", (lifetimes,), lambda: least_saved(lifetimes))
    return whole / setting.mesh.size


def _lifetimes(graph: Graph, setting: Setting, trained: int, parameters: ParameterValues, shared: Shared) -> Lifetimes:
    kind = setting.cluster.device.kernels
    updates = _updates(trained, setting)

    def made() -> Lifetimes:
        return Lifetimes(graph, Clock.of(graph, updates), parameters, kind, held_by_kernels(shared.kernels, kind))

    return shared.of_graph(("lifetimes", kind, updates), (graph, parameters, shared.kernels), made)


def _gathered(wiring: Wiring, parameters: ParameterValues, bytes_: LocalBytes) -> set[fx.Node]:
    """The parameters that at least one choice gathers."""
    found = set()
    for edge, value in zip(wiring.edges, wiring.values, strict=True):
        if value in parameters.owners and bytes_.is_any(bytes_.by_flows(edge, type_of(value)).made):
            found.add(parameters.owners[value])
    return found


def _unread(graph: Graph, wiring: Wiring, clock: Clock) -> list[Piece]:
    """Pieces of tensors that the model holds and no op reads: whole on every device, whatever is chosen."""
    found = []
    for name, type_ in graph.unread if wiring.sites else ():
        kind = "parameters" if name.startswith("parameter ") else "inputs and buffers"
        whole = np.full(len(wiring.sites[0].choices), float(type_.nbytes))
        if type_.nbytes:
            found.append(Piece(kind, 0, False, whole, 0, clock.last))
    return found


def _rows_out(graph: Graph, wiring: Wiring, clock: Clock) -> list[Piece]:
    """A piece for outputs kept while micro-batches pass: whole on every device, less those of one turn."""
    rows = dict(graph.rows_out)
    named = zip(graph.output_names, info(graph.output).outputs, strict=False)
    nbytes = sum(t.nbytes for name, t in named if name in rows) * (graph.turns - 1)
    whole = np.full(len(wiring.sites[0].choices), float(nbytes))
    return [Piece("inputs and buffers", 0, False, whole, 0, clock.last)] if nbytes else []


def _updates(trained: int, setting: Setting) -> int:
    """The number of times in the optimizer's step: 1, or one per trained parameter.

    Trained parameters have times of their own on a CPU, if the optimizer makes temporaries.
    """
    one_by_one = setting.cluster.device.kernels == "cpu" and optimizer_figures(setting.optimizer, 4)["temporary"]
    return max(1, trained) if one_by_one else 1

"""Lower a local program to forward and backward: traced together as ATen code, rewritten by passes, then split.

    trace                   the local program and its gradients, on fake tensors
    joint_passes.PASSES     rewrite the joint graph; each has a before and an after, `verify` runs after each
    split                   forward: what the outputs need; backward: the rest; saved: what crosses
    in_two_parts            backward of a micro-batch once more, in two, where a pipeline's order asks for it
    schedule.PASSES         rewrite each half: when its collectives begin and end
    wait_on_host            values that the plan has on the host leave forward, and come back in backward
    bring_up                parameters that lie on the host come up before they are read, and gradients go down
    hand_over_gradients     parameters are stepped while backward goes on

Nothing here knows the rank's process groups: a collective names its mesh axis, and `bind` puts the axis in its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.fx as fx

from autopar.codegen import joint_graph, joint_passes, schedule
from autopar.codegen.backward_parts import in_two_parts
from autopar.codegen.brought_up import bring_up
from autopar.codegen.chunks import mark_region
from autopar.codegen.convolutions import part_convolutions
from autopar.codegen.exchanges import sent_by_ops
from autopar.codegen.half import Half, Read, fetched
from autopar.codegen.halves import Joint, split
from autopar.codegen.handed_over import hand_over_gradients
from autopar.codegen.joint_graph import JointGraph
from autopar.codegen.local import LocalProgram
from autopar.codegen.offloaded import EVERYTHING_STAYS, Offloaded, wait_on_host
from autopar.codegen.recomputed import NOTHING, Recomputed
from autopar.codegen.records import Records, key_of
from autopar.codegen.trace import trace
from autopar.graph.graph import info, op_name
from autopar.ops.entry import facts_of
from autopar.passes import run_passes
from autopar.runtime.private import TRACING, clean_room


class Lowerings:
    """Cache of the latest `most` programs that this process has lowered."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.known: dict[Hashable, Joint] = {}

    def get(self, key: Hashable, make: Callable[[], Joint]) -> Joint:
        """The program under a key, made by `make` where it is missing; a full cache drops its oldest."""
        if key not in self.known:
            while len(self.known) >= self.most:
                self.known.pop(next(iter(self.known)))
            self.known[key] = make()
        return self.known[key]

    def clear(self) -> None:
        self.known.clear()


LOWERED = Lowerings(most=64)


@dataclass(frozen=True, slots=True)
class Turn:
    """What the turns of a program share: nodes that run once before the first, and whether backward is in two parts."""

    once: frozenset[str] = frozenset()  # names of nodes of the local program
    in_parts: bool = False


ALONE = Turn()


@dataclass(frozen=True, slots=True)
class States:
    """Decisions of a plan beside its choices: how parameters travel, and where values are between the halves."""

    regathered: frozenset[str] = frozenset()  # parameters
    scattered: frozenset[str] = frozenset()  # parameters whose gradients are reduced in every micro-batch
    reads: Mapping[str, Read] = field(default_factory=dict)  # parameter -> its first read in forward
    recomputed: Recomputed = NOTHING  # values that backward makes again
    offloaded: Offloaded = EVERYTHING_STAYS  # values that wait for backward on the host
    turn: Turn = ALONE

    @property
    def key(self) -> Hashable:
        """A key that is equal for equal states."""
        parameters = self.regathered, self.scattered, tuple(sorted(self.reads.items()))
        return *parameters, self.recomputed.key, self.offloaded.key, self.turn


PLAIN = States()


def lower_jointly(
    program: LocalProgram,
    differentiable: Sequence[int],
    states: States = PLAIN,
    device: str = "cpu",
    records: Records | None = None,
) -> Joint:
    """Trace a program with its gradients, rewrite it, split it into halves and schedule their collectives.

    Equal programs are lowered once in a process, or read from `records`, which notes what it is asked for. The nodes
    that run once before the first turn get a graph of their own, as do the two parts of backward.
    """
    decisions = (tuple(differentiable), states.key, device, regrouped(program))

    def make() -> Joint:
        return _lower(program, differentiable, states, device)

    with TRACING:
        if records is None:
            return LOWERED.get((program.fingerprint, *decisions), make)
        key = key_of(program, *decisions)
        joint = LOWERED.get((program.fingerprint, *decisions), lambda: records.get(key, make))
        records.used[key] = joint
        return joint


def _lower(program: LocalProgram, differentiable: Sequence[int], states: States, device: str) -> Joint:
    with clean_room():
        joint = trace(program, differentiable, device)
    sent = sent_by_ops(joint)
    mark_region(joint, program)
    primals = dict(zip(program.parameters, joint.primals[joint.inputs :], strict=False))
    types = dict(zip(program.parameters, list(program.types.values())[joint.inputs :], strict=False))
    for name, primal in primals.items():
        read = states.reads.get(name) or Read(0, 0, types[name].nbytes)
        joint.reads[primal] = replace(read, is_reduced_at_once=name in states.scattered)
    joint.ways = {primal: _way_from(program.fx, place) for place, primal in enumerate(joint.primals)}
    passes = [one for one in joint_passes.PASSES if states.turn.in_parts or one is not part_convolutions]
    run_passes("joint graph", passes, joint, joint_graph.verify, JointGraph.text)
    regathered = {primal for name, primal in primals.items() if name in states.regathered}
    halves = split(joint, regathered, states.recomputed, states.turn.once)
    if states.turn.in_parts:
        halves = replace(halves, parts=in_two_parts(halves))
    ways = {name: primal.name for primal, names in joint.ways.items() for name in names}
    written = {joint.primals[place].name: output for place, output in program.written.items()}
    _schedule(
        halves, {primal.name: read for primal, read in joint.reads.items()}, ways, states.recomputed, program, written
    )
    wait_on_host(halves, states.offloaded)
    named = {name: primal.name for name, primal in primals.items()}
    bring_up(halves, named, states.offloaded)
    hand_over_gradients(halves, named, states.offloaded.handed_over)
    return replace(halves, sent=sent)


def _way_from(graph: fx.Graph, place: int) -> frozenset[str]:
    """Names of the conversions, casts and views through which all readers of a placeholder get it.

    They are read off the local program, which has the same nodes on every rank. The traced graph has not: of one row,
    torch leaves out sums that other ranks need.
    """
    node = graph.find_nodes(op="placeholder")[place]
    found = set[str]()
    while len(node.users) == 1:
        before = node
        (node,) = before.users
        is_form = node.op == "call_function" and (
            info(node).kind == "conversion"
            or (info(node).kind == "op" and facts_of(op_name(node)).same and _rows(node) == _rows(before))
        )
        if not is_form:
            break
        found.add(node.name)
    return frozenset(found)


def _rows(node: fx.Node) -> int:
    return math.prod(info(node).outputs[0].shape)


def regrouped(program: LocalProgram) -> frozenset[str]:
    """Names of views that keep the rank but change the whole shape; the shape of a part may stay the same."""
    found = set()
    for node in program.fx.nodes:
        if "info" in node.meta and info(node).kind == "op" and facts_of(op_name(node)).free:
            before = next((info(n).outputs[0].shape for n in node.all_input_nodes), None)
            after = info(node).outputs[0].shape
            if before is not None and before != after and len(before) == len(after):
                found.add(node.name)
    return frozenset(found)


def _schedule(
    halves: Joint,
    reads: Mapping[str, Read],
    ways: Mapping[str, str],
    recomputed: Recomputed,
    program: LocalProgram,
    written: Mapping[str, int],
) -> None:
    """Move each half's collectives to run beside compute; `reads` is by the names of primals."""
    begun = _begun(halves, reads)
    stay = {node.name: reads[p.name] for node, p in fetched(halves.forward, reads).items() if reads[p.name].stays}
    back: dict[str, Any] = {
        "is_backward": True,
        "kept": stay | begun,
        "recomputed": recomputed,
        "regrouped": regrouped(program),
        "ways": ways,
    }
    ahead: dict[str, Any] = {"is_backward": False, "regrouped": back["regrouped"]}
    backwards = [halves.backward, halves.hold]
    backwards += [] if halves.parts is None else [halves.parts.inward, halves.parts.weights]
    parts = [Half(halves.forward, reads, kept=begun, outputs=halves.outputs, written=written, **ahead)]
    parts += [Half(graph, reads, **back) for graph in backwards]
    if halves.beginning is not None:
        in_line = {name: replace(read, beside=(None, None)) for name, read in reads.items()}
        parts.append(Half(halves.beginning, in_line, **ahead))
    for half in parts:
        run_passes("half", schedule.PASSES, half, schedule.verify, Half.text)
        half.graph.lint()


def _begun(halves: Joint, reads: Mapping[str, Read]) -> dict[str, Read]:
    """The copies of parameters that the beginning hands to every turn, by name."""
    if halves.beginning is None:
        return {}
    copies = fetched(halves.beginning, reads)
    left = halves.beginning.output_node().args[0]
    names = [node.name for node in halves.forward.find_nodes(op="placeholder")]
    here = zip(names[len(names) - len(left) :], left, strict=True)
    return {name: reads[copies[node].name] for name, node in here if node in copies}

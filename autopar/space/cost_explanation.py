"""Text about the seconds of an op: its kernels, their formulas or curves, and the sources."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch.fx as fx

from autopar.graph.graph import Graph, info, op_name
from autopar.once import Once
from autopar.ops.entry import facts_of
from autopar.sharding.certainty import FROM, MEASURED
from autopar.sharding.cost_model import Kernel
from autopar.sharding.strategies import Choice
from autopar.space.bindings import Bindings
from autopar.space.chosen import Chosen
from autopar.space.kernel_sites import KernelSites
from autopar.space.op_exchanges import Sent, sent_under
from autopar.space.op_seconds import OpSeconds, seconds_in_chunks
from autopar.space.setting import Setting


@dataclass(frozen=True, eq=False)
class CostLines:
    """Lines about the seconds of any op of a space, by its name."""

    graph: Graph
    setting: Setting
    bindings: Bindings
    sites: KernelSites
    of_graph: Once

    @functools.cached_property
    def seconds(self) -> OpSeconds:
        return OpSeconds(self.graph, self.setting, self.sites, self.of_graph)

    @functools.cached_property
    def ops(self) -> dict[str, fx.Node]:
        return {info(node).key: node for node in self.bindings.rules}

    def __call__(self, name: str, choice: Choice) -> list[str]:
        """A line for each kernel of the op under a choice, and one for what its local form sends.

        Of the loss, one about the step's fixed seconds.
        """
        node = self.ops.get(name)
        if node is None:
            return self._of_step(name)
        chosen = Chosen(node, self.bindings.rules[node], (choice,), self.bindings.tensors[node])
        kernels = self.seconds.kernels(chosen)
        lines = [self._line("forward", 1, kernel, "forward") for kernel in kernels.forward]
        lines += [self._line("backward", count, kernel, "backward") for count, kernel in kernels.backward]
        lines += [self._line(f"backward, {k.names[0]}", count, k, "forward") for count, k in kernels.beside]
        return [*self._of_chunks(chosen), *(line for line in lines if line), *self._of_exchanges(chosen)]

    def beside(self, name: str, choice: Choice) -> list[Sent]:
        """The messages of an op under a choice that run beside its compute, in all of its chunks."""
        node = self.ops.get(name)
        if node is None:
            return []
        chosen = Chosen(node, self.bindings.rules[node], (choice,), self.bindings.tensors[node])
        chunks = info(node).chunks
        return [s._replace(once=s.once * chunks) for s in sent_under(self.seconds, chosen, choice) if s.beside]

    def _of_exchanges(self, chosen: Chosen) -> list[str]:
        """A line about each kind of message that an op's local form sends along an axis under this choice."""
        found = []
        for s in sent_under(self.seconds, chosen, chosen.choices[0]):
            what = f"{s.times} {s.exchange.kind}@{self.setting.mesh.axes[s.axis]} of {s.nbytes:.0f} bytes"
            hidden = f", beside {s.beside:.0%} of its compute" if s.beside else ""
            found.append(f"{s.exchange.way}, inside it: {what}, {s.seconds * 1e6:.1f} us{hidden}")
        return found

    def unaligned(self, choices: Mapping[str, Choice]) -> dict[str, float]:
        """Seconds, by name, that products among these ops lose to rows not in multiples of 16 bytes."""
        if not self.seconds.costs.knows_unaligned:
            return {}
        found = {}
        for name, choice in choices.items():
            node = self.ops.get(name)
            if node is not None and facts_of(op_name(node)).flops:
                chosen = Chosen(node, self.bindings.rules[node], (choice,), self.bindings.tensors[node])
                if lost := self.seconds.unaligned(chosen) * self.setting.passes:
                    found[name] = lost
        return found

    def _of_step(self, name: str) -> list[str]:
        """A line about the seconds of a step outside of ops, which are counted at the loss; none elsewhere."""
        seconds, names = self.setting.cluster.step_s, self.graph.output_names
        if not seconds or name != f"out.{names[self.graph.loss or 0]}":
            return []
        what = "a step beside its ops and its communication, where ranks wait for each other"
        return [f"{what}: {seconds * 1e6:.1f} us, {FROM[MEASURED]}"]

    def _of_chunks(self, chosen: Chosen) -> list[str]:
        """A line about an op that runs in chunks: their number, and the seconds of summing its gradients."""
        count = info(chosen.node).chunks
        if count == 1:
            return []
        nothing = np.zeros(1)
        added = float(seconds_in_chunks(self.seconds, chosen, (nothing, nothing))[1][0])
        sums = f"; sums of gradients {added * 1e6:.1f} us" if added else ""
        return [f"in {count} chunks of rows, each of which takes what follows{sums}"]

    def _line(self, what: str, count: int, kernel: Kernel, way: str) -> str:
        """The line about a kernel that runs `count` times; "" where it takes no time."""
        costs = self.seconds.costs
        seconds = float((costs.forward if way == "forward" else costs.backward)(kernel)[0])
        if not count or not seconds:
            return ""
        times = f"{count} x " if count > 1 else ""
        return f"{what}: {times}{seconds * 1e6:.1f} us, {FROM[costs.source(kernel)]}: {costs.told(kernel, way)}"

"""`Space`: every legal way to run a graph on a mesh, with its seconds. Numbers and names only; no torch.

    Site    a parameter, an input, an op or an output: its choices (a strategy per axis) and the seconds of each
    Edge    a value from one site to another: what it may carry at either end, and the seconds of each conversion
    Window  communication that moves while some ops compute: the shorter of both takes no time

`shardings.py` builds it, and solvers read it.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from autopar.once import Once
from autopar.sharding.convert import ShapeConsistencyManager
from autopar.sharding.placement import Flow, Sharding
from autopar.sharding.strategies import Choice, values
from autopar.space.memory import Memory
from autopar.space.setting import Setting
from autopar.space.windows import Window

if TYPE_CHECKING:
    from autopar.graph.nodes import TensorType
    from autopar.space.kernel_sites import KernelSites
    from autopar.space.op_exchanges import Sent

Flows = tuple[Flow, ...]  # one per axis


class StoragePolicy(NamedTuple):
    """How a parameter that is cut moves, and where it and its optimizer states lie."""

    regathered: bool = False  # whether its gathered copy is dropped, and made again in backward
    scattered: bool = False  # whether its gradient is reduced in every micro-batch, not once after them
    on_host: float = 0.0  # bytes of it that lie on the host, where its step runs: at least its optimizer states
    with_part: bool = False  # whether its stored part and its gradient lie there as well


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """A place of the graph where something is chosen: a parameter, an input, an op or an output."""

    name: str  # the node's key: `blocks.0.up/linear`
    op: str
    kind: str  # "parameter", "buffer", "input", "op", "output", "update"
    choices: tuple[Choice, ...]
    seconds: np.ndarray  # forward and backward, or the optimizer's step of a parameter, by choice
    source: str = ""
    has_rule: bool = True
    bytes: int = 0  # bytes of a whole parameter
    policies: tuple[StoragePolicy, ...] = ()  # policies of a parameter by choice; () where there is one alone
    priced_by: str = ""  # the source of the seconds: a name of `sharding/certainty.py`
    suspected: str = ""  # a rule line under which an op without a rule passed a trial
    compute: tuple[np.ndarray, ...] = ()  # an op's seconds of compute, forward and backward
    # an op's exposed seconds of messages that its local form sends
    exchange: tuple[np.ndarray, ...] = ()
    outputs: tuple[str, ...] = ()  # dtypes and global shapes, `float32[8, 16]`; of an output site, of what arrives

    def at(self, places: Sequence[int], **changes: Any) -> Site:
        """The site with its choices at these places alone, which may repeat."""
        return replace(
            self,
            **{
                "choices": tuple(self.choices[i] for i in places),
                "seconds": self.seconds[places],
                "compute": tuple(part[places] for part in self.compute),
                "exchange": tuple(part[places] for part in self.exchange),
                "policies": tuple(self.policies[i] for i in places) if self.policies else (),
                **changes,
            },
        )

    def of_node(self, name: str, source: str) -> Site:
        """The site of another node that shares these tables. Called for every op of a model: no `replace`."""
        return Site(
            name,
            self.op,
            self.kind,
            self.choices,
            self.seconds,
            source,
            self.has_rule,
            self.bytes,
            self.policies,
            self.priced_by,
            self.suspected,
            self.compute,
            self.exchange,
            self.outputs,
        )

    def sharing(self, like: Site) -> Site:
        """The site with the choices and tables of a site like it, so that both share what is known by id."""
        return replace(
            self,
            choices=like.choices,
            seconds=like.seconds,
            compute=like.compute,
            exchange=like.exchange,
            policies=like.policies,
        )

    @property
    def regathered(self) -> tuple[bool, ...]:
        """Whether backward gathers a parameter again, by choice; () where it never does."""
        marks = tuple(policy.regathered for policy in self.policies)
        return marks if any(marks) else ()

    @property
    def scattered(self) -> tuple[bool, ...]:
        """Whether a gradient is reduced in every micro-batch, by choice; () where it never is."""
        marks = tuple(policy.scattered for policy in self.policies)
        return marks if any(marks) else ()

    @property
    def parts_on_host(self) -> tuple[bool, ...]:
        """Whether the stored part of a parameter lies on the host, by choice; () where it never does."""
        marks = tuple(policy.with_part for policy in self.policies)
        return marks if any(marks) else ()

    def has_on_host(self, choice: int) -> bool:
        """Whether a choice of a parameter has something of it on the host."""
        return self.kind == "parameter" and bool(self.policies) and self.policies[choice].on_host > 0

    def is_cut(self) -> list[bool]:
        """Whether the first output lies in parts, by choice."""
        return [_has_parts(values(choice.output())) for choice in self.choices]


@dataclass(frozen=True, slots=True, eq=False)
class Edge:
    """A value on its way from one site to another."""

    source: int  # index of the site that gives the value
    target: int  # index of the site that takes it
    operand: int  # index of the operand there
    given: tuple[Flows, ...]  # distinct flows that may leave
    taken: tuple[Flows, ...]  # distinct flows that may arrive
    given_by: np.ndarray  # choice of the source -> index in `given`
    taken_by: np.ndarray  # choice of the target -> index in `taken`
    seconds: np.ndarray  # [given, taken]; inf where nothing leads
    type: TensorType
    # managers of its conversions and its gradient's, where not the space's own: parameters are gathered in one message
    # a window, and reduced in buckets
    ahead: ShapeConsistencyManager | None = None
    back: ShapeConsistencyManager | None = None
    # seconds of converting the value once, and its gradient, by [given, taken]; 0 where nothing leads
    forward: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    backward: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    reduced_in: int = 0  # itemsize of its gradient while it is reduced; 0: the value's own

    def between(self, source: int, target: int, operand: int) -> Edge:
        """The edge of other sites that shares these tables. Called for every operand of a model: no `replace`."""
        return Edge(
            source,
            target,
            operand,
            self.given,
            self.taken,
            self.given_by,
            self.taken_by,
            self.seconds,
            self.type,
            self.ahead,
            self.back,
            self.forward,
            self.backward,
            self.reduced_in,
        )

    def place(self, picked: Sequence[int]) -> tuple[Any, Any]:
        """The entry, [given, taken], of the edge's tables under the picked choices of all sites."""
        return self.given_by[picked[self.source]], self.taken_by[picked[self.target]]

    def marked(self, choices: Sequence[bool]) -> np.ndarray:
        """A mask of the flows in `given` that leave under the marked choices of the source."""
        flows: np.ndarray = np.zeros(len(self.given), dtype=bool)
        if any(choices):
            flows[self.given_by[np.array(choices, bool)]] = True
        return flows


def _has_parts(sharding: Sharding) -> bool:
    return any(placement.is_shard for placement in sharding.placements)


def reduces(taken: Sequence[Flows], given: Sequence[Flows]) -> np.ndarray:
    """Whether a gradient is a partial sum that is reduced on some axis on its way back, by [taken, given]."""
    found: np.ndarray = (_are_sums(taken)[:, None] & ~_are_sums(given)[None]).any(-1)
    return found


def _are_sums(side: Sequence[Flows]) -> np.ndarray:
    """Whether the gradients of flows are partial sums, by [flows, axis]."""
    return np.array([[flow.gradient.is_partial for flow in flows] for flows in side])


class Outdone(Exception):
    """Raised where no plan of a space is faster than one that is known."""

    def __init__(self, floor: float) -> None:
        super().__init__(f"{floor} s at least")
        self.floor = floor


@dataclass(frozen=True, slots=True)
class Rival:
    """A plan that is known, of another space. A space is made no further once its plans are known to be slower.

    `bound` gives the seconds that no plan of a space goes below, whatever it holds.
    """

    seconds: float = math.inf
    bound: Callable[[Space], float] | None = None

    def check_sites(self, sites: Sequence[Site]) -> None:
        """Raise `Outdone` where the fastest choices of all sites take as long as the rival."""
        least = {id(s.seconds): float(s.seconds.min()) for s in sites}
        self._check(sum(least[id(s.seconds)] for s in sites))

    def check(self, space: Space) -> None:
        """Raise `Outdone` where the bound says that no plan of a space is faster than the rival."""
        if self.bound is not None and math.isfinite(self.seconds):
            self._check(self.bound(space))

    def _check(self, floor: float) -> None:
        if floor >= self.seconds:
            raise Outdone(floor)


@dataclass(frozen=True, slots=True, eq=False)
class Space:
    """All that can be chosen for a graph on a mesh, and the price of each choice."""

    setting: Setting
    sites: tuple[Site, ...]
    edges: tuple[Edge, ...]
    conversions: ShapeConsistencyManager
    digest: str  # the graph's digest
    memory: Memory | None = None
    windows: tuple[Window, ...] = ()  # spans in which communication may overlap compute
    # how the seconds of a site came to be under a choice, a line for each kernel
    told: Callable[[str, Choice], list[str]] | None = None
    # seconds that products lose under their choices because their rows are not aligned
    unaligned: Callable[[Mapping[str, Choice]], dict[str, float]] | None = None
    # Messages of a site under a choice, of those that run beside its compute.
    beside: Callable[[str, Choice], list[Sent]] | None = None
    warnings: tuple[str, ...] = ()  # rules of users that could not be tried
    kernels: KernelSites | None = None  # None without a graph
    # ops whose forward runs before the first of several micro-batches, unless their choice drops what it makes
    once: frozenset[str] = frozenset()
    # Findings about choices and seconds alone. A space whose bytes are counted later keeps them.
    known: Once = field(default_factory=Once)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def __str__(self) -> str:
        lines = [
            f"space on mesh {self.setting.mesh} of {self.setting.cluster}: {len(self.sites)} sites, "
            f"{sum(len(s.choices) for s in self.sites)} choices, {len(self.edges)} edges"
        ]
        for site in self.sites:
            without = "" if site.has_rule else ", no rule"
            lines.append(f"{site.name}: {site.op}, {len(site.choices)} choices{without}")
            lines += [f"    {s * 1e6:10.1f} us  {choice}" for s, choice in zip(site.seconds, site.choices, strict=True)]
        return "\n".join(lines)

    def cost(self, chosen: dict[str, Choice]) -> float:
        """Step seconds of one assignment of choices by name: the objective of solvers, computed without one."""
        picked = [site.choices.index(chosen[site.name]) for site in self.sites]
        return float(
            sum(site.seconds[i] for site, i in zip(self.sites, picked, strict=True))
            + sum(e.seconds[e.place(picked)] for e in self.edges)
            - self.hidden(picked)
        )

    def is_once(self, site: int, choice: int) -> bool:
        """Whether an op, under a choice, runs its forward once a call, before the first of its micro-batches."""
        of = self.sites[site]
        return of.name in self.once and not (of.regathered and of.regathered[choice])

    def hidden(self, picked: Sequence[int]) -> float:
        """Seconds of communication that compute hides, under the picked choices."""
        return sum(w.times * min(w.seconds(picked, self.edges)) for w in self.windows)

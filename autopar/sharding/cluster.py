"""`Cluster`: the devices of a machine and the links between them, as data.

Peak rates, memory, latencies and bandwidths, each with its source, and what `autopar calibrate` measured. `links` are
ordered from the innermost level outwards: the first joins the devices of a node, the second the nodes.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from collections import Counter
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from autopar import codec
from autopar.codec import Codec
from autopar.letters import BadCluster, among
from autopar.sharding.device import Curve, Device, check_curve, on_curve
from autopar.sharding.host import Host
from autopar.sharding.mesh import DeviceMesh

DEFAULT = "generic"
# The collectives that a link is asked about.
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send")


@dataclass(frozen=True, slots=True)
class Link:
    """Latency and bandwidth of one link level: inside a node, or between nodes."""

    name: str
    latency_s: float  # seconds of the smallest call
    bytes_per_s: float
    hop_s: float = 0.0  # seconds from one device to the next in a ring collective
    # (kind of collective, bytes/s that a device moves), counted as in a bus bandwidth.
    reached: tuple[tuple[str, float], ...] = ()
    # (kind, share of `reached` by number of members on this level): the more take part, the less each one reaches.
    falls: tuple[tuple[str, Curve], ...] = ()
    # Seconds that each doubling of the members adds to a sum, by the bytes that a device's link takes part with.
    doubling: Curve = ()

    def __post_init__(self) -> None:
        if unknown := [kind for kind, _ in (*self.reached, *self.falls) if kind not in KINDS]:
            raise ValueError(f"{unknown[0]!r} is not one of {', '.join(KINDS)}")
        for kind, shares in self.falls:
            check_curve(f"falls of {kind}", shares, most=1.0)
        if self.doubling:
            check_curve("doubling", self.doubling)

    def sum_s(self, members: int, nbytes: float) -> float:
        """Seconds of a sum's way up and down the tree of so many members, beside those of its bytes."""
        each = 2 * self.hop_s
        if self.doubling and nbytes > self.doubling[0][0]:
            each = max(each, float(on_curve(self.doubling, nbytes)))
        return each * math.ceil(math.log2(members))

    def wire(self, kind: str, members: int = 1) -> float:
        """Bytes/s that a kind of collective of so many members reaches.

        The nominal bytes/s where nobody measured that kind. Shares are read between points on the log of the number of
        members, and beyond the last as the last two say, but never rise; a twentieth is the least.
        """
        rate = dict(self.reached).get(kind, self.bytes_per_s)
        points = dict(self.falls).get(kind)
        return rate if points is None else rate * _share(points, members)


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of a collective on an axis of `size` devices `stride` ranks apart, measured while all ranks ran."""

    kind: str
    size: int
    stride: int
    latency_s: float
    bytes_per_s: float
    # seconds by bytes of the whole tensor, as they were measured: they come before latency and bytes/s
    times: Curve = ()

    hop_s = 0.0  # the latency is of all hops
    doubling = ()

    def sum_s(self, members: int, nbytes: float) -> float:
        """Nothing: the latency is of all hops."""
        return 0.0

    def wire(self, kind: str, members: int = 1) -> float:
        """Bytes/s of the measured collective."""
        return self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of an op on one device by amount, forward and backward, measured while all ranks ran.

    `autopar.calibrate.workloads` says what is counted as the amount of an op.
    """

    op: str
    dtype: str
    forward: Curve
    backward: Curve
    at: float = 0.0  # the second size on which the seconds also depend; 0 where there is none

    def slowed(self, by: float) -> Timed:
        """The curves with all seconds multiplied by `by`."""
        return replace(self, forward=_slowed(self.forward, by), backward=_slowed(self.backward, by))


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices and the links between them."""

    name: str
    device: Device
    links: tuple[Link, ...]  # innermost first
    devices_per_node: int
    nodes: int = 1
    sources: tuple[tuple[str, str], ...] = ()
    measured: tuple[Measured, ...] = ()  # curves of `autopar calibrate`, preferred to the links' figures
    timed: tuple[Timed, ...] = ()  # curves of `autopar calibrate`, preferred to the device's rates
    hidden: float = 1.0  # share of the shorter of concurrent compute and communication that is hidden
    # Seconds of a step's ops, relative to the sum of the seconds of each measured alone.
    together: float = 1.0
    step_s: float = 0.0  # fixed seconds of a step beside its ops: ranks that wait for each other, code around it
    variation: float = 0.0  # standard deviation / mean of the seconds of devices of one kind
    host: Host | None = None  # the memory of a node's host; None: nobody says how devices reach it
    part: str = ""  # Text that tells it from other parts of the same name.

    def __str__(self) -> str:
        return f"{self.name} ({self.device.name}, {self.devices_per_node} a node)"

    def levels(self, mesh: DeviceMesh, axis: int, kind: str = "") -> tuple[tuple[int, Link | Measured], ...]:
        """The link levels that a group along an axis spans, innermost first, as (number of devices, link).

        Where collectives of this `kind` were measured on such an axis, that is the only level. Ranks are row-major on
        the mesh and fill nodes in order. An axis that crosses nodes irregularly is as slow as between nodes.
        """
        size = mesh.shape[axis]
        stride = math.prod(mesh.shape[axis + 1 :])
        node = self.devices_per_node
        for m in self.measured:
            if (m.kind, m.size, m.stride) == (kind, size, stride):
                return ((size, m),)
        inner, outer = self.links[0], self.links[-1]
        if mesh.ranks:
            counts = set[int]()  # numbers of ranks that a group has in one node
            for group in mesh.groups(axis):
                counts.update(Counter(rank // node for rank in group).values())
            here = counts.pop() if len(counts) == 1 else 1
        else:
            here = size if mesh.size <= node else _in_a_node(size, stride, node)
        return tuple((n, link) for n, link in ((here, inner), (size // here, outer)) if n > 1) or ((1, inner),)

    def within_stages(self, mesh: DeviceMesh, axis: str) -> Cluster:
        """The machine as the devices of a stage see it; stages stand along an axis of this mesh.

        The mesh is that of all devices. Nodes are as large as the parts of stages that one node holds, row-major on the
        mesh of a stage. Where stages are divided unlike each other, their size divides that of all parts.
        """
        a = mesh.axis(axis)
        in_stages = sorted(mesh.ranks or range(mesh.size), key=lambda rank: mesh.coordinate(rank)[a])
        size = mesh.size // mesh.shape[a]
        places = enumerate(rank // self.devices_per_node for rank in in_stages)
        parts = itertools.groupby(places, lambda place: (place[0] // size, place[1]))
        here = math.gcd(*(len(list(part)) for _, part in parts))
        if a == 0 and here == min(size, self.devices_per_node):
            return self
        inner = math.prod(mesh.shape[a + 1 :])
        measured = [m for m in self.measured if m.size * m.stride <= inner]
        for m in self.measured:
            if m.stride >= inner * mesh.shape[a] and m.stride % mesh.shape[a] == 0:
                measured.append(replace(m, stride=m.stride // mesh.shape[a]))
        return replace(self, devices_per_node=here, nodes=size // here, measured=tuple(measured))

    def of_nodes(self, nodes: int) -> Cluster:
        """The same machine with another number of nodes, by which it is named."""
        kind = re.sub(r"-\d+x\d+$", "", self.name)
        return replace(self, name=f"{kind}-{self.devices_per_node}x{nodes}", nodes=nodes)

    def with_fabric(self, gbits: float) -> Cluster:
        """The same machine with `gbits` Gbit/s for each device between nodes, called `NAME@400G`.

        Collectives reach the share of its bytes/s that they reach of the link's in the cluster's file (all of it where
        the file has no figures), and latencies stay. What was measured between nodes is left out.
        """
        if not 0 < gbits < math.inf:
            raise BadCluster(f"{gbits} Gbit/s is not the rate of a fabric", advice="with_fabric(400)")
        outer = self.links[-1]
        bytes_per_s = gbits * 1e9 / 8
        reached = tuple((kind, rate / outer.bytes_per_s * bytes_per_s) for kind, rate in outer.reached)
        link = Link(
            f"{gbits:g} Gbit/s a device in place of {outer.name}",
            outer.latency_s,
            bytes_per_s,
            outer.hop_s,
            reached,
            outer.falls,
            outer.doubling,
        )
        kind = re.sub(r"-\d+x\d+$", "", self.name)
        size = self.name.removeprefix(kind)
        return replace(
            self,
            name=f"{kind.partition('@')[0]}@{gbits:g}G{size}",
            links=(*(self.links[:-1] or self.links), link),
            measured=tuple(m for m in self.measured if m.size * m.stride <= self.devices_per_node),
        )

    @property
    def fabric(self) -> str:
        """Text about the link between nodes, where `with_fabric` put it there; else ""."""
        if "@" not in self.name:
            return ""
        link = self.links[-1]
        shares = sorted({round(100 * rate / link.bytes_per_s) for _, rate in link.reached})
        reach = " to ".join(f"{share}" for share in dict.fromkeys((*shares[:1], *shares[-1:]))) or "100"
        alone = "" if self.nodes > 1 else "; one node has no use for it"
        gigabytes = link.bytes_per_s / 1e9
        latency = f"its latency of {link.latency_s * 1e6:.4g} us"
        return f"{link.name}: {gigabytes:.4g} GB/s, of which collectives reach {reach} %, with {latency}{alone}"

    def slowest_of(self, devices: int) -> float:
        """The expected time of the slowest of several devices, for which all wait, relative to that of one.

        The expected maximum of normal variables with standard deviation `variation`, in Blom's approximation.
        """
        return 1.0 + self.variation * NormalDist().inv_cdf((devices - 0.375) / (devices + 0.25))

    def times_of(self, op: str, dtype: str) -> Timed | None:
        """The measured times of an op, scaled to what it takes within a step; None where it was not measured.

        Of several curves by a second size, the one of the smallest size.
        """
        found = self.curves_of(op, dtype)
        return found[0] if found else None

    def curves_of(self, op: str, dtype: str) -> tuple[Timed, ...]:
        """The measured curves of an op, by second size, scaled to what it takes within a step; maybe none."""
        return _by_name(self.timed, self.together).get((op, dtype), ())

    @staticmethod
    def of(given: Any) -> Cluster:
        """The cluster that a caller means: a Cluster, a known name, the path of a JSON profile, or None.

        None is the default cluster. "h100-8x4" names 4 nodes of 8 devices each, and "h100@400G-8x4" such nodes between
        which each device has 400 Gbit/s.
        """
        if given is None:
            return Cluster.of(DEFAULT)
        if isinstance(given, Cluster):
            return given
        if isinstance(given, (str, Path)):
            if Path(given).suffix == ".json":
                return _read(Path(given).stem, Path(given))
            match = re.fullmatch(r"([a-z0-9]+?)(?:@(\d+(?:\.\d+)?)G)?(?:-([1-9]\d*)x([1-9]\d*))?", str(given))
            folder = resources.files("autopar.sharding").joinpath("clusters")
            known = sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json"))
            if match and match[1] in known:
                cluster = _read(match[1], folder.joinpath(f"{match[1]}.json"))
                if match[3]:
                    host = cluster.host and cluster.host.of_share(int(match[3]) / cluster.devices_per_node)
                    cluster = replace(cluster, devices_per_node=int(match[3]), host=host).of_nodes(int(match[4]))
                return cluster.with_fabric(float(match[2])) if match[2] else cluster
            raise BadCluster(
                f"no cluster is called {str(given)!r}",
                seen=among(known, re.split("[-@]", str(given))[0]),
                advice='a name such as "h100-8x4", or the path of a .json profile',
            )
        raise BadCluster(
            f"{given!r} is not a cluster",
            advice='autopar.Cluster, a name such as "h100-8x4", or the path of a .json profile',
        )

    @staticmethod
    def named_by(text: str) -> Cluster | None:
        """The cluster that a plan's text names; None where the file that it was read from is elsewhere."""
        try:
            return Cluster.of(text.partition(" ")[0])
        except BadCluster:
            return None

    def save(self, path: str | Path) -> None:
        """Write the cluster as JSON that `Cluster.of(path)` reads."""
        data = _CODEC.write(self, _KEYS)
        Path(path).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _share(points: Curve, members: int) -> float:
    doublings = [math.log2(n) for n, _ in points]
    shares = [share for _, share in points]
    at = math.log2(members)
    if at > doublings[-1] and len(points) > 1:
        slope = (shares[-1] - shares[-2]) / (doublings[-1] - doublings[-2])
        return max(0.05, shares[-1] + min(0.0, slope) * (at - doublings[-1]))
    return float(np.interp(at, doublings, shares))


def _in_a_node(size: int, stride: int, node: int) -> int:
    """Devices of a group on one node, for ranks `stride` apart; 1 where groups fall on nodes irregularly."""
    if node % (stride * size) == 0:
        return size
    if node % stride == 0 and size % (node // stride) == 0:
        return node // stride
    return 1


@functools.lru_cache(maxsize=8)
def _by_name(timed: tuple[Timed, ...], together: float) -> dict[tuple[str, str], tuple[Timed, ...]]:
    found = dict[tuple[str, str], tuple[Timed, ...]]()
    for t in sorted(timed, key=lambda t: t.at):
        found[t.op, t.dtype] = (*found.get((t.op, t.dtype), ()), t.slowed(together))
    return found


def _slowed(times: Curve, by: float) -> Curve:
    return tuple((amount, by * seconds) for amount, seconds in times)


def _read(name: str, file: Any) -> Cluster:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        found = _CODEC.read(Cluster, data, _OPTIONAL, _KEYS)
        if not found["links"]:
            raise ValueError("links: none, and devices have to be connected")
        return Cluster(name=name, **found)
    except (OSError, *codec.UNREADABLE) as e:
        raise BadCluster(f"the cluster file {file} cannot be read", seen=codec.seen(e)) from e


# What a cluster file has, and what it may lack.
_KEYS = tuple(key for key in codec.fields_of(Cluster) if key != "name")
_OPTIONAL = {k: v for k, v in codec.defaults_of(Cluster).items() if k not in ("nodes", "sources")}
_FROM_0 = functools.partial(codec.number, least=0)
_RATES = codec.pairs_by_name(codec.number)
_CODEC = Codec(
    {
        "flops_per_s": _RATES,
        "reached": _RATES,
        "falls": codec.pairs_by_name(codec.each(codec.in_order(codec.number, codec.number))),
        "sources": codec.pairs_by_name(codec.text),
        "hidden": functools.partial(codec.number, least=0, most=1),
        "together": functools.partial(codec.number, least=1e-6),
        "step_s": _FROM_0,
        "variation": _FROM_0,
    },
    dict.fromkeys(("flops_per_s", "reached", "falls", "sources"), dict),
    is_strict=True,
)

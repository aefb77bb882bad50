"""`Planning`: the search for a plan of one graph, on one mesh or another.

Where the fastest plan does not fit in the budget, the loss head runs in chunks (`turns/chunked.py`), and the search
goes on with recompute.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from autopar.collector import without_collections
from autopar.graph.graph import Graph, info
from autopar.kernels.backend import is_traced
from autopar.kernels.measured import taken
from autopar.letters import BadConstraint, BadPreset, Infeasible, NotServed
from autopar.limits import LIMITS
from autopar.once import Once
from autopar.progress import detail
from autopar.request import Request
from autopar.runtime.collectives import TIME
from autopar.sharding.mesh import DeviceMesh
from autopar.solver.figures import budget_for, size
from autopar.solver.limits import LIMITS as SOLVER
from autopar.solver.plan import Plan
from autopar.solver.policies import POLICIES
from autopar.solver.program import least_seconds, most_promising_first, peak_where_nothing_is_dear, solve
from autopar.solver.standing_bytes import refuse_below
from autopar.space.constraints import Constraints, Preset
from autopar.space.presets import preset_of, warnings_of, warnings_of_habits, window_of
from autopar.space.saved import bytes_that_stand
from autopar.space.schedule import windows_to_search
from autopar.space.setting import Setting
from autopar.space.shardings import Uncounted, uncounted
from autopar.space.shared import Shared
from autopar.space.space import Outdone, Rival, Space
from autopar.turns import FEW, Head, head_of, in_chunks, numbers_of_chunks, why_whole


@dataclass(frozen=True, slots=True)
class Planning:
    """A request for one graph, to be planned on one mesh or another."""

    request: Request
    graph: Graph
    until: float  # a time of the monotonic clock, after which a plan that was found is not improved
    why_whole: str = ""  # why the loss head does not run in chunks under a budget
    is_trial: bool = False  # whether the caller plans otherwise if nothing fits
    is_tight: bool = False  # whether the fastest plan is known not to fit in the budget
    rival: Plan | None = None  # a plan with another number of chunks
    apart: frozenset[str] = frozenset()  # results of groups of ops that a kernel could stand for and does not
    has_habits: bool = True  # whether a preset's habits are kept to
    parts_on_host: bool = False  # whether parameters themselves may lie on the host, beside their states
    made: Once = field(default_factory=Once)  # facts of the graph alone, for the spaces of all meshes
    spaces: Once = field(default_factory=Once)  # spaces and their tables: `made` holds none, so they end with a search

    @without_collections
    def on(self, mesh: DeviceMesh, known: float = math.inf) -> Plan:
        """The fastest plan on a mesh. A plan has to take less than `known` seconds."""
        asked = self.request
        if self.graph.turns > 1 and TIME in mesh.axes:
            raise NotServed(
                f"an axis of mesh {mesh} has the name of the axis of time, on which micro-batches are",
                advice=f"another name than {TIME!r}, or microbatches=1",
            )
        try:
            return self._with_kernels(mesh, known)
        except BadConstraint as e:
            if asked.parallel is None or asked.constraints:
                raise
            raise BadPreset(
                f"parallel={asked.parallel!r} does not fit this model on mesh {mesh}: {e.what}",
                at=e.at,
                seen=e.seen,
                advice="another preset, or constraints beside it that free what is named",
            ) from e

    def _with_kernels(self, mesh: DeviceMesh, known: float) -> Plan:
        """A plan that counts a kernel only where no conversion stands among the ops that it replaces.

        A group of ops that one kernel could stand for is counted as that kernel. Where a plan puts a conversion among
        them, no kernel can: they are counted as ops, and it is planned again.
        """
        plan = self._planned(mesh, known)
        if not plan.kernels or not is_traced(self.request.hardware.device.kernels):
            return plan
        apart = self.apart  # Other plans may still run the kernels that this one cannot.
        bound = plan.lower_bound_s
        for search in range(1, LIMITS.kernel_searches + 1):
            assert plan.search is not None and plan.fused is not None
            left = plan.search.counted_as_kernels - plan.fused.keys()
            if not left:
                return replace(plan, lower_bound_s=bound, defaults=(*plan.defaults, *_said_of_groups(apart)))
            apart |= left
            if search < LIMITS.kernel_searches:
                plan = replace(self, apart=apart)._planned(mesh, known)
                bound = min(bound, plan.lower_bound_s)
        plan = replace(self, request=replace(self.request, kernels=False))._planned(mesh, known)
        bound = min(bound, plan.lower_bound_s)
        said = f"none: in each of {LIMITS.kernel_searches} searches other groups of ops had a conversion among them"
        return replace(plan, lower_bound_s=bound, defaults=(*plan.defaults, ("kernels", said)))

    def _planned(self, mesh: DeviceMesh, known: float) -> Plan:
        """The fastest plan on a mesh; where that does not fit in the budget, one that does."""
        try:
            return self._by_preset(mesh, known)
        except _DoesNotFit as e:
            return self._under_budget(e.space, mesh, known)

    def _by_preset(self, mesh: DeviceMesh, known: float) -> Plan:
        """The plan on a mesh, by the preset that the request names, or freely."""
        parallel = self.request.parallel
        if parallel is None:
            return self._solved(mesh, known)
        expert = preset_of(parallel, self.graph, mesh)
        try:
            plan = self._solved(mesh, known, expert)
            priced = warnings_of_habits(expert.habits)
        except (BadConstraint, Infeasible):
            if not expert.habits:
                raise
            kept = ", ".join(f"{habit} along {mesh.axes[a]}" for a, habit in expert.habits)
            plan = replace(self, has_habits=False)._solved(mesh, known, replace(expert, habits=()))
            broken = f"{parallel!r} is not kept to everywhere: {kept} leaves no plan"
            plan = replace(plan, warnings=(broken, *plan.warnings))
            priced = ()
        whole = warnings_of(parallel, mesh, plan.parameters, plan.parameter_bytes)
        return replace(plan, warnings=(*plan.warnings, *whole, *priced))

    def _solved(self, mesh: DeviceMesh, known: float, preset: Preset | None = None) -> Plan:
        """The fastest plan on a mesh that fits in the budget.

        Without a preset, which has windows of its own, all windows are searched, and the bound holds in any of them.
        """
        spaces = _spaces_of(self, mesh, known, preset)
        found = _Fastest(self.rival, known)
        left = list(spaces.windows)
        if not self.is_tight:
            left.clear()
            made = _most_promising_first(found.made(spaces))
            for one in made:
                try:
                    found.add(functools.partial(self._freely, one, spaces))
                except _DoesNotFit:
                    left.append(one.space.setting.window_bytes)
            if left and found.best is None and self.request.chunks == "auto":
                raise _DoesNotFit(made[-1].space)
        for least in sorted(left):  # small windows hold copies for the shortest time
            try:
                found.add(functools.partial(self._within_budget, least, spaces))
            except Infeasible:
                if found.best is None:
                    raise
        return found.plan

    def _freely(self, uncounted: Uncounted, spaces: _Spaces, rival: float) -> Plan:
        """The fastest plan of a space, if it fits in the budget."""
        budget = self.request.budget
        if math.isfinite(budget) and self.request.recompute in ("auto", "none") and uncounted.least_bytes() > budget:
            raise _DoesNotFit(uncounted.space)
        refuse_below(space := uncounted.counted(), budget)
        if math.isinf(budget) or peak_where_nothing_is_dear(space) <= budget:
            plan = self._fastest(space, spaces, math.inf, rival)
            if plan.peak_bytes <= budget:
                return plan
        raise _DoesNotFit(space)

    def _within_budget(self, least: int, spaces: _Spaces, rival: float) -> Plan:
        """The fastest plan within the budget, in windows of `least` bytes, which may drop gathered copies."""
        space = spaces.of(least, regather=True).counted()
        refuse_below(space, self.request.budget)
        return self._fastest(space, spaces, self.request.budget, rival)

    def _under_budget(self, space: Space, mesh: DeviceMesh, known: float) -> Plan:
        """The plan where the fastest does not fit, with a loss head in chunks where these are nearly free.

        Where they are not, it is the fastest of plans with these chunks, fewer, and a whole head, under the least of
        their bounds.
        """
        keeps = self.request.keeps_outputs
        found = head_of(self.graph, keeps)
        whole = replace(self, is_tight=True, why_whole=found.why)
        head = found.head
        numbers = () if head is None else numbers_of_chunks(head)
        optimizer = 0 if self.request.states_on_host else self.request.optimizer
        is_over = bytes_that_stand(self.graph, optimizer) / mesh.size > self.request.budget
        if head is None or not numbers or is_over:
            return whole._planned(mesh, known)
        few = [n for n in numbers if n <= FEW]
        trial = replace(whole, graph=in_chunks(self.graph, few.pop(), keeps))
        if trial.graph.chunks == 1:
            return replace(whole, why_whole=why_whole(self.graph, numbers[0], keeps))._planned(mesh, known)
        try:
            plans = [trial._planned(mesh, known)]
        except Infeasible as e:
            if self.is_trial or e.smallest > SOLVER.recompute.far * self.request.budget:
                raise  # a whole head hardly needs less
            try:
                return whole._planned(mesh, known)
            except Infeasible as letter:
                how = f"whose loss head runs in {trial.graph.chunks} chunks"
                raise naming_the_smaller(letter, e.smallest, how, "with a whole loss head") from e
        if _seconds_of_chunks(space, head, plans[0]) <= LIMITS.free * plans[0].step_time_s:
            return plans[0]
        for chunks in (1, *few):
            with contextlib.suppress(Infeasible):
                graph = in_chunks(self.graph, chunks, keeps)
                other = replace(trial, graph=graph, rival=plans[-1], is_trial=True)
                plans.append(other._planned(mesh, known))
        fastest = plans[-1]
        return replace(fastest, lower_bound_s=min(p.lower_bound_s for p in plans))

    def _fastest(self, space: Space, spaces: _Spaces, budget: float, rival: float) -> Plan:
        """The fastest plan of a space within a budget, with what the request says of it."""
        asked = self.request
        mesh = space.setting.mesh
        detail("searching %d places on mesh %s: %s", len(space.sites), mesh, _how(self, mesh, budget))
        plan = solve(
            space,
            asked.solver,
            budget=budget,
            gap=asked.gap,
            until=self.until,
            recompute=asked.recompute,
            wide=functools.partial(spaces.wide, space.setting.window_bytes),
            is_trial=self.is_trial,
            rival=rival,
            room=asked.room,
        )
        has_asked = asked.memory_budget is not None and plan.peak_bytes <= asked.budget
        return replace(
            plan,
            budget=float(int(asked.budget)) if has_asked and math.isfinite(asked.budget) else plan.budget,
            precision=(asked.precision.param, asked.precision.reduce) if asked.precision else None,
            assumptions=tuple(self.graph.assumptions),
            defaults=(*asked.defaults(self.graph), *plan.defaults, *_said_of_head(self)),
            bound_of=_bound_of(self),
            host_budget=0.0 if asked.room is None else asked.room.bytes,
            chunks=self.graph.chunks,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Spaces:
    """The spaces of one graph on a mesh: one for each way to cut it into windows."""

    windows: tuple[int, ...]  # least bytes of each
    setting: Setting
    rival: Rival
    make: Callable[..., Uncounted]
    kept: dict[Setting, Uncounted]  # spaces of which a floor is known, until they are asked for

    def of(self, least: int, regather: bool = False) -> Uncounted:
        """The space with windows of `least` bytes, in which gathered parameters may be dropped or not.

        Raises `Outdone` where no plan of it takes less than the rival.
        """
        setting = replace(self.setting, window_bytes=least, regather=regather)
        kept = self.kept.pop(setting, None)
        return self.make(setting, rival=self.rival) if kept is None else kept

    def floor(self, least: int, gap: float) -> float:
        """Seconds that no plan in windows of `least` bytes goes below; the rival's are enough."""
        setting = replace(self.setting, window_bytes=least)
        known = self.rival.seconds
        try:
            priced = self.make(setting, rival=Rival(known))
        except Outdone as e:
            return e.floor
        floor = least_seconds(priced.space, known, gap)
        if floor < known:
            self.kept[setting] = priced
        return floor

    def wide(self, first: int) -> list[Space]:
        """The spaces with all that saves memory, the one of these windows first."""
        others = [least for least in self.windows if least != first]
        settings = [replace(self.setting, window_bytes=least, regather=True) for least in (first, *others)]
        return [self.make(setting, rival=Rival()).counted() for setting in settings]


def _spaces_of(planning: Planning, mesh: DeviceMesh, known: float, preset: Preset | None) -> _Spaces:
    """The spaces of the graph on a mesh."""
    asked = planning.request
    graph = planning.graph
    made = planning.made
    constraints = Constraints(asked.constraints, mesh, preset)
    setting = Setting(
        mesh,
        asked.hardware,
        asked.optimizer,
        asked.accumulation,
        asked.precision.reduce if asked.precision else "",
        compiled=asked.compile,
        kernels=taken(asked.kernels, asked.hardware.device.kernels, asked.compile),
        strict=asked.strict,
        apart=planning.apart,
        host_bytes=asked.states_on_host,
        parts_on_host=planning.parts_on_host or constraints.speak_of_parts_on_host,
        turns=graph.turns,
    )
    shared = planning.spaces(setting, (graph,), lambda: Shared.of(graph, setting, made))
    make = functools.partial(uncounted, graph, constraints=asked.constraints, preset=preset, shared=shared)
    bound = functools.partial(least_seconds, rival=known, gap=asked.gap)
    rival = Rival(known, None if mesh in _meshes_with_floors(planning) else bound)
    kept: dict[Setting, Uncounted] = planning.spaces("kept", (graph,), dict)
    if preset is None:
        windows = made("windows", (graph,), lambda: windows_to_search(graph))
        return _Spaces(windows, setting, rival, make, kept)
    # A preset that says how parameters are gathered has one space, whether they may be dropped or not.
    speaks = constraints.speak_of_gathering

    def once(setting: Setting, rival: Rival) -> Uncounted:
        setting = replace(setting, regather=setting.regather or speaks)
        what = rival.seconds, preset.key, setting
        return planning.spaces(what, (graph, asked), lambda: make(setting, rival=rival))

    return _Spaces((window_of(asked.parallel, mesh),), setting, rival, once, kept)


@without_collections
def floor_of(planning: Planning, mesh: DeviceMesh, known: float = math.inf) -> float:
    """Seconds that no plan on a mesh goes below, whatever it holds; `known` seconds are enough.

    It is 0 where a preset or constraints leave out most of what there is.
    """
    asked = planning.request
    if asked.parallel is not None or asked.constraints or (planning.graph.turns > 1 and TIME in mesh.axes):
        return 0.0
    spaces = _spaces_of(planning, mesh, known, None)
    _meshes_with_floors(planning).add(mesh)
    return min(spaces.floor(least, asked.gap) for least in spaces.windows)


def _meshes_with_floors(planning: Planning) -> set[DeviceMesh]:
    """The meshes of which a bound is known already; those that are planned all the same are below it."""
    found: set[DeviceMesh] = planning.made("floors", (), set[DeviceMesh])
    return found


class _Fastest:
    """The fastest plan of several searches, and a bound that holds in all of them."""

    def __init__(self, rival: Plan | None, known: float) -> None:
        self.best = rival
        self.known = known  # seconds of a plan on another mesh
        self.bound = math.inf

    def made(self, spaces: _Spaces) -> list[Uncounted]:
        """The spaces that may have a plan which takes less than the known one."""
        made = []
        for least in spaces.windows:
            try:
                made.append(spaces.of(least))
            except Outdone as e:
                self.bound = min(self.bound, e.floor)
        return made

    def add(self, search: Callable[..., Plan]) -> None:
        """Run a search; it raises `Outdone` where no plan takes less than its `rival` seconds."""
        try:
            plan = search(rival=min(self.known, math.inf if self.best is None else self.best.step_time_s))
        except Outdone as e:
            self.bound = min(self.bound, e.floor)
            return
        self.bound = min(self.bound, plan.lower_bound_s)
        if self.best is None or plan.step_time_s < self.best.step_time_s:
            self.best = plan

    @property
    def plan(self) -> Plan:
        """The fastest plan, with the bound of all searches; raises `Outdone` where there is none."""
        if self.best is None:
            raise Outdone(self.bound)
        return replace(self.best, lower_bound_s=self.bound)


def _most_promising_first(made: Sequence[Uncounted]) -> list[Uncounted]:
    """Spaces of the same choices, in the order of `most_promising_first`."""
    of_space = {id(one.space): one for one in made}
    spaces = [one.space for one in made]
    return [of_space[id(space)] for space in most_promising_first(spaces)]


class _DoesNotFit(Exception):
    """The fastest plan of a space needs more than the budget."""

    def __init__(self, space: Space) -> None:
        super().__init__()
        self.space = space


def _seconds_of_chunks(space: Space, head: Head, plan: Plan) -> float:
    """Seconds that a loss head in chunks takes beyond the fastest choices of its ops when it is whole."""
    ops = {info(node).key for node in head.ops}
    least = sum(float(site.seconds.min()) for site in space.sites if site.name in ops)
    takes = sum(d.seconds for name, d in plan.decisions.items() if name in ops or d.op in ("chunk", "added_up"))
    return takes - least


def _how(planning: Planning, mesh: DeviceMesh, budget: float) -> str:
    """A search in words, and whether it is not the first one."""
    graph = planning.graph
    said = ["whatever a plan holds" if math.isinf(budget) else f"within {size(budget)} a device"]
    said += [f"in {graph.turns} micro-batches"] if graph.turns > 1 else []
    said += [f"with the loss head in {graph.chunks} chunks"] if graph.chunks > 1 else []
    said += ["with a whole loss head"] if planning.is_tight and graph.chunks == 1 else []
    said += [] if planning.has_habits else ["without the habits of the preset"]
    said += [f"with {len(planning.apart)} groups of ops without a kernel"] if planning.apart else []
    before = planning.made(("searches", mesh), (), list[str])
    again = "again, " if before else ""
    before.append(again)
    return again + ", ".join(said)


def _bound_of(planning: Planning) -> str:
    """The plans that the bound holds for, in words: those that keep to pins, or run in turns and chunks."""
    asked = planning.request
    graph = planning.graph
    pins = [f"parallel={asked.parallel!r}"] if asked.parallel is not None else []
    pins += ["the constraints"] if asked.constraints else []
    pins += [f"recompute={asked.recompute!r}"] if asked.recompute in POLICIES else []
    of = [f"that keeps to {' and '.join(pins)}"] if pins else []
    of += ["that recomputes the same values"] if callable(asked.recompute) else []
    if graph.turns > 1:
        of.append(f"in {graph.turns} micro-batches")
    elif planning.is_tight and asked.microbatches == "auto":  # more would need less recompute
        of.append("with the batch at once")
    of += [f"with a loss head in {graph.chunks} chunks"] if graph.chunks > 1 else []
    return " ".join(of)


def _said_of_head(planning: Planning) -> list[tuple[str, str]]:
    """A line of text about the loss head under a budget, where there is something to say."""
    if planning.graph.chunks > 1:
        return [("head", f"in {planning.graph.chunks} chunks of rows, whose logits are not kept")]
    return [("head", f"whole: {planning.why_whole}")] if planning.why_whole else []


def _said_of_groups(apart: frozenset[str]) -> list[tuple[str, str]]:
    """A line of text about the groups of ops that a kernel could stand for and does not."""
    if not apart:
        return []
    few = ", ".join(sorted(apart)[:3]) + (f" and {len(apart) - 3} more" if len(apart) > 3 else "")
    return [("one by one", f"ops that a kernel could stand for, with a conversion among them: {few}")]


def naming_the_smaller(letter: Infeasible, smallest: float, how: str, whole: str) -> Infeasible:
    """The letter, about plans such as `whole` says, which names a smaller one if there is one.

    `smallest` are the bytes of that other plan, and `how` says in what it differs.
    """
    if not smallest < letter.smallest:
        return letter
    return letter.but(
        seen=f"{size(smallest)} in the smallest plan that was found, {how}; {size(letter.smallest)} in the smallest "
        f"{whole}",
        advice=f"{budget_for(smallest)}, or more devices",
        smallest=smallest,
        fullest=f"{size(smallest)}, {how}",
    )

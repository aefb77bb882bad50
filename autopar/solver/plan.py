"""`Plan`: a strategy for every site, its cost, and how far it may be from the best.

A value: its text is in `summary.py` and `text.py`, its JSON in `archive.py`. Nothing here builds a plan or searches for
one, and nothing imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from autopar.letters import BadBudget, BadPlan
from autopar.sharding.certainty import middle, spread
from autopar.sharding.mesh import DeviceMesh
from autopar.sharding.placement import Sharding
from autopar.sharding.strategies import Choice, values
from autopar.solver import archive, staged, summary, text
from autopar.solver.decision import Conversion, Decision, Offloaded, Recomputed, Regathered, State, states_of
from autopar.solver.lanes import Event
from autopar.solver.profiled import StepTimeline
from autopar.solver.record import Record
from autopar.solver.trace import told_of
from autopar.solver.workload import StepRates, StepWork
from autopar.space.space import StoragePolicy
from autopar.stages.pipeline import Pipeline

if TYPE_CHECKING:
    import torch

    from autopar.solver.curve import Curve
    from autopar.solver.travels import Travel


class Beside(NamedTuple):
    """Step time and memory of a preset's plan on the same mesh."""

    name: str
    step_time_s: float
    peak_bytes: int
    fits: bool = True  # whether it fits the budget: by default, the device's memory less a reserve
    why: str = ""  # reason why there is no such plan


class SearchedSpace(Protocol):
    """The space and prices that a plan was chosen at, which only the process that planned has."""

    @property
    def is_priced(self) -> bool:
        """Whether bytes have a price, because of a budget."""

    @property
    def is_over(self) -> bool:
        """Whether the space was released."""

    @property
    def counted_as_kernels(self) -> frozenset[str]:
        """The results of the groups of ops whose seconds and bytes are those of a kernel."""

    def line(self) -> tuple[list[str], dict[str, list[int]]]:
        """The times of a step by name, and the bytes that the plan holds at each, by kind."""

    def events(self) -> list[Event]:
        """The predicted step as events."""

    def told(self, name: str) -> list[str]:
        """A line for each kernel of an op, with its seconds and their origin."""

    def rivals(self, name: str, most: int = 3) -> list[tuple[Choice, float, float]]:
        """The best other choices of a site, each with the extra seconds of the plan and of the op itself."""

    def curve(self, budgets: int | Sequence[int], host: bool) -> Curve:
        """The fastest step under each budget; where the plan may, with values on the host, or without."""

    def travel(self, value: str) -> Travel | None:
        """The copies of a value to the host and back; None of one that stays."""

    def moved(self) -> list[tuple[int, int, float]]:
        """The seconds of a step where a stage begins so many blocks later, by stages and by blocks."""

    @property
    def known_beside(self) -> tuple[Beside, ...] | None:
        """Plans of presets on the same mesh, if they were asked for; else None."""

    def beside(self) -> tuple[Beside, ...]:
        """Plans of presets on the same mesh."""

    def let_go(self) -> None:
        """Release the space. `autoparallelize` does, so that no training holds it."""


_MOST_BUDGETS = 1000  # A curve refuses a larger number of budgets, which is probably meant as bytes.
GraphCheck = Callable[..., None]  # (plan, model, meta_inputs, loss, assume, outputs): a letter unless they agree


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """A strategy for every site. A plan changes only speed and memory: what the program computes is not in it."""

    mesh: DeviceMesh
    cluster: str
    decisions: Mapping[str, Decision] = field(repr=False)
    conversions: tuple[Conversion, ...] = field(repr=False)
    step_time_s: float
    lower_bound_s: float
    parameter_bytes: Mapping[str, int] = field(repr=False)
    digest: str  # digest of the graph that the plan was made for
    window_bytes: int  # least bytes of parameters in a window of gathers and reductions
    # The plans that `lower_bound_s` holds for, where these are not all: those that keep to pins, micro-batches, chunks.
    bound_of: str = ""
    optimizer: str | float = "adamw"
    without_rule: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    defaults: tuple[tuple[str, str], ...] = ()  # arguments left at their defaults, with what they meant
    warnings: tuple[str, ...] = ()  # constraints that are not kept, and users' rules that could not be tried
    memory: Mapping[str, int] = field(default_factory=dict, repr=False)  # bytes a device at the peak, by kind
    peak_at: str = ""  # time of the step at which memory peaks
    budget: float = math.inf  # bytes a device; infinite where none was asked for
    # Meshes that the search met, each with its seconds, bound, peak bytes, and why it was refused.
    meshes: tuple[tuple[str, float, float, int, str], ...] = ()
    beside_s: float = 0.0  # communication in windows, which may overlap with compute
    hidden_s: float = 0.0  # the part of it that compute hides
    hidden_on_host_s: float = 0.0  # copies of parameters on the host, and steps there, that compute hides
    accumulation: int = 1  # calls that make one optimizer step
    chunks: int = 1  # number of chunks of rows in which the loss head runs
    kernels: tuple[str, ...] = ()  # families of kernels that may take the place of ops
    # The families of the kernels in its program, by the last results of the ops that each replaces. A plan of an older
    # release has None: all kernels that can stand.
    fused: Mapping[str, str] | None = field(default=None, repr=False)
    microbatches: int = 1  # the number of them in which the batch of a call passes
    sources: Mapping[str, float] = field(default_factory=dict)  # seconds of the step by their source
    compiled: bool = False  # whether the seconds are those of code that torch.compile makes
    precision: tuple[str, str] | None = None  # dtypes of compute and of the reduction of gradients
    # parameters whose gradients are reduced in each micro-batch, not once at the end
    scattered: frozenset[str] = frozenset()
    hosted: frozenset[str] = frozenset()  # parameters that the host steps, with their optimizer states there
    wholly_hosted: frozenset[str] = frozenset()  # parameters that lie there with their gradients and states
    # The states of values that are not saved for backward, by the names of parameters, ops and conversions.
    states: Mapping[str, State] = field(default_factory=dict, repr=False)
    recompute_s: float = 0.0  # seconds of the step that recompute takes
    # Values that backward needs in a plan that recomputes or offloads, named as in `recomputed`. Each has its bytes on
    # a device and the seconds that recomputing it takes.
    needed: Mapping[str, tuple[int, float]] = field(default_factory=dict, repr=False)
    first_peak_bytes: int = 0  # peak of the first step, before the optimizer has states
    host_budget: float = 0.0  # bytes of the host's memory that a device may use
    host_bytes: int = 0  # the most that it uses during a step
    # seconds that products take more because their rows are not a whole number of 16 bytes, where that was measured
    unaligned: Mapping[str, float] = field(default_factory=dict, repr=False)
    # ops without a rule, and the line under which each ran right when it was tried
    suspected: tuple[tuple[str, str], ...] = ()
    # searches that were stopped before their end, after work that was counted: the gap says what they left open
    stopped: tuple[str, ...] = ()
    pipeline: Pipeline | None = None  # how stages of the model run, where they do; `mesh` is that of one stage
    workload: StepWork = field(
        default_factory=StepWork, repr=False
    )  # What a step computes; files of older releases do not say.
    # Text about the values that the certificate of the lowered program leaves untyped. Not written to files.
    untyped: str = field(default="", repr=False, compare=False)
    search: SearchedSpace | None = field(default=None, repr=False, compare=False)
    origin: Any = field(default=None, repr=False, compare=False)  # What it was made of, in the process that made it.
    record: Record = field(
        default_factory=Record, repr=False, compare=False
    )  # The file that a plan is read from keeps a little of the search.

    check_graph: ClassVar[GraphCheck | None] = None  # given by autopar.api, which can trace a model
    write_report: ClassVar[Callable[..., Path] | None] = None  # given by autopar.report
    write_program: ClassVar[Callable[..., Path] | None] = None  # given by autopar.compiling, which can lower a plan
    write_html: ClassVar[Callable[[Plan], str] | None] = None  # given by autopar.report, for notebooks

    def __post_init__(self) -> None:
        for name in ("decisions", "parameter_bytes", "memory", "states", "sources", "needed", "unaligned"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def __reduce__(self) -> Any:  # a plan travels between ranks as data
        return Plan.from_dict, (self.to_dict(),)

    def __hash__(self) -> int:
        return hash((self.mesh, self.digest, self.step_time_s))

    @property
    def gap(self) -> float:
        """The distance from the lower bound, as a share of the step time: a better plan can gain no more."""
        return (self.step_time_s - self.lower_bound_s) / self.step_time_s if self.step_time_s else 0.0

    @property
    def devices(self) -> int:
        """The number of devices that a step runs on."""
        return self.mesh.size if self.pipeline is None else self.pipeline.mesh.size

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """The coordinate of a rank on the mesh, which with stages is that of its own stage."""
        return self.mesh.coordinate(rank) if self.pipeline is None else self.pipeline.split(rank)[1]

    @property
    def expected_s(self) -> float:
        """Seconds that a measured step is expected to take: the median, by the predictions' sources.

        `step_time_s` is the sum of formulas behind it, in which plans are compared.
        """
        return self.step_time_s * middle(self.sources)

    @property
    def rates(self) -> StepRates:
        """Rows and tokens a second, and MFU, of a step that takes as long as is expected."""
        return self.rates_at(self.expected_s)

    def rates_at(self, step_s: float) -> StepRates:
        """Rows and tokens a second, and MFU, of a step that takes so many seconds, as one that was measured."""
        return StepRates(self.workload, self.devices, step_s)

    @property
    def step_interval_s(self) -> tuple[float, float]:
        """Seconds (low, high) between which nine of ten measured steps lie, by the predictions' sources."""
        low, high = spread(self.sources)
        return self.step_time_s * low, self.step_time_s * high

    @property
    def parameters(self) -> dict[str, Sharding]:
        """The sharding in which each parameter is stored."""
        return {name: values(d.flows()) for name, d in self.decisions.items() if d.kind == "parameter"}

    @property
    def recomputed(self) -> frozenset[str]:
        """The values of ops and conversions that backward recomputes."""
        return frozenset(name for name, state in self.states.items() if isinstance(state, Recomputed))

    @property
    def passing(self) -> dict[str, str]:
        """The recomputed values that are made in passing too, for the backward of ops behind the one named."""
        return {n: state.passing for n, state in self.states.items() if isinstance(state, Recomputed) and state.passing}

    @property
    def regathered(self) -> frozenset[str]:
        """The parameters whose gathered copies are dropped after forward, and gathered again in backward."""
        return frozenset(name for name, state in self.states.items() if isinstance(state, Regathered))

    @property
    def offloaded(self) -> dict[str, tuple[str, str]]:
        """The values that wait for backward on the host, each with the ops behind and before which it travels."""
        return {n: (state.gone, state.comes) for n, state in self.states.items() if isinstance(state, Offloaded)}

    @property
    def storage(self) -> dict[str, StoragePolicy]:
        """The policies of parameters that are regathered or scattered; of others, `StoragePolicy()`."""
        again = self.regathered
        return {name: StoragePolicy(name in again, name in self.scattered) for name in sorted(again | self.scattered)}

    @property
    def peak_bytes(self) -> int:
        """The most bytes that the fullest device holds during a step."""
        return sum(self.memory.values())

    # -- text

    def __str__(self) -> str:
        """A summary of the plan, in at most 15 lines of 100 columns."""
        return summary.summary_of(self)

    def __repr__(self) -> str:
        fits = f", peak_bytes={self.peak_bytes:,}" if self.memory else ""
        cut = "" if self.pipeline is None else f"{len(self.pipeline.place)} stages, "
        return f"Plan({cut}mesh={self.mesh}, step_time_s={self.step_time_s:.6g}, gap={self.gap:.2%}{fits})"

    def _repr_html_(self) -> str | None:
        return Plan.write_html(self) if Plan.write_html is not None else None

    def table(self) -> str:
        """A table of the plan's parameters, ops, conversions and recompute, with equal layers in one row."""
        return text.table_of(self)

    def beside(self) -> tuple[Beside, ...]:
        """The same model on the same mesh under ddp, fsdp and megatron, whatever memory they take.

        Beside a plan in stages, these are plans on all devices without stages.

        As `explain`, it needs the space: it is for the process that planned. `print(plan)` names them from then on.
        """
        return self._searched("beside").beside()

    def explain(self, pattern: str) -> str:
        """Text about the sites whose name begins with a pattern: their choices, conversions and best rivals.

        A rival is another choice, with the seconds of the best plan that has it. The space that tells them exists in
        the process that planned, until `autoparallelize` takes the plan. "pipeline" is the stages of a plan, and what
        it would cost to cut elsewhere.
        """
        return text.explained(self, pattern)

    def line(self) -> tuple[list[str], dict[str, list[int]]]:
        """The times of a step by name, and the bytes that a device holds at each, by kind.

        Of a plan that was read from a file, the fullest time of each of some 150 spans of the step; of one in stages,
        the actions of its fullest coordinate.
        """
        if self.pipeline is not None:
            return staged.line_of(self)
        is_in_file = not self.has_space and bool(self.record.times)
        return self.record.line() if is_in_file else self._searched("line").line()

    @property
    def known_beside(self) -> tuple[Beside, ...] | None:
        """Plans of presets on the same mesh, if they were asked for before the plan was saved; else None."""
        if self.search is not None and self.search.known_beside is not None:
            return self.search.known_beside
        rows = self.record.beside
        found = [Beside(name, math.inf if s is None else s, n, fits, why) for name, s, n, fits, why in rows]
        return tuple(found) or None

    def timeline(self) -> StepTimeline:
        """The predicted step, event by event: `.save(path)` writes a trace for Perfetto.

        The trace has the memory of a device, too, and arrows from what moves to what reads it. Beside a
        torch.profiler.profile of a step of its program, `.save(path, profile)` has both, and
        `.compare(profile)` the errors by kind of op. As `explain`, it needs the space. Of a plan in stages it has a
        pair of lanes for each coordinate, and needs none.
        """
        if self.pipeline is not None:
            return StepTimeline((), {}, devices=tuple(staged.devices_of(self)))
        kinds = {name: decision.op for name, decision in self.decisions.items() if decision.kind == "op"}
        kinds |= {name: summary.ITSELF for name, decision in self.decisions.items() if decision.kind == "output"}
        return StepTimeline(tuple(self._searched("timeline").events()), kinds, told_of(self))

    def report(self, path: str | Path, budgets: int = 0) -> Path:
        """Write a page about the plan, one file that needs no network: open it in a browser.

        Where the space is there, the page shows memory over the step, prices and rivals; with `budgets`, also a curve
        of step times under so many budgets.
        """
        if Plan.write_report is None:
            raise BadPlan("a report is written by autopar.report", advice="import autopar.api")
        return Plan.write_report(self, path, budgets)

    def compile(self, path: str | Path, inputs: str = "global", device: str = "") -> Path:
        """Write the lowered program of every rank to a file, which `autoparallelize(program=...)` takes.

        Args:
            path: Where the file goes.
            inputs: As of `autoparallelize`.
            device: The kind of device on which it will run, "cpu" or "cuda"; that of this machine where it is empty.
        """
        if Plan.write_program is None:
            raise BadPlan("a program is lowered by the compiler", advice="import autopar.api")
        return Plan.write_program(self, path, inputs, device)

    def curve(self, budgets: int | Sequence[int] = 20, host: bool = True) -> Curve:
        """The fastest step under each of several memory budgets, all from one search; printed, it is a table.

        `budgets` are bytes a device, or how many between the lowest peak that was found and that of the fastest plan. A
        plan for one of them is looked at more closely, and may take turns that this plan does not. Under a
        `host_budget` values may wait on the host at each of them; with `host=False` none does. As `explain`, it needs
        the space.
        """
        if not isinstance(host, bool):
            raise BadBudget(
                f"host={host!r} says nothing about a curve", advice="plan(..., host_budget=...), host=False"
            )
        if self.pipeline is not None:
            raise BadPlan(
                "a plan in stages has no curve of budgets",
                advice="autopar.plan(..., memory_budget=...) for each, or the curve of a plan without a pipeline",
            )
        return self._searched("curve").curve(_budgets_of(budgets), host)

    @property
    def has_space(self) -> bool:
        """Whether the space that it was chosen from is there: in the process that planned, until it trains."""
        return self.search is not None and not self.search.is_over

    def _searched(self, call: str) -> SearchedSpace:
        """The space that the plan was chosen from, for the method `call`; a letter where it is gone."""
        if self.search is None or not self.has_space:
            raise BadPlan("the space that this plan was chosen from is gone", advice=f"autopar.plan(...).{call}()")
        return self.search

    def diff(self, other: Plan) -> str:
        """Text about the sites that two plans decide differently, this plan first."""
        if not isinstance(other, Plan):
            raise BadPlan(f"{other!r} is not a plan to compare with")
        return text.difference(self, other)

    # -- another plan from this one

    def constraints(self, *patterns: str) -> dict[str, str]:
        """The decisions for parameters and inputs that match the patterns, as `constraints=` of another plan.

        Without patterns, all of them. Pin some, search the rest.
        """
        storage = self.storage
        found = {}
        for name, d in self.decisions.items():
            is_named = any(fnmatchcase(name, pattern) for pattern in patterns or ("*",))
            if d.kind == "parameter" and is_named:
                moves = storage.get(name, StoragePolicy())
                policy = "regathered" if moves.regathered else "kept"
                reduced = "each" if moves.scattered else "end"
                stored = values(d.flows()).text(self.mesh.axes)
                states = f"; {self._place_of(name)}" if self.host_budget else ""
                found[escape(name)] = f"{stored}; {self._use_of(name, stored)}; {policy}; {reduced}{states}"
            elif d.kind == "input" and is_named:
                found[escape(name)] = self._use_of(name, values(d.flows()).text(self.mesh.axes))
        return found

    def recomputing(self, values: Iterable[str], passing: Mapping[str, str] | None = None) -> Plan:
        """The plan whose backward recomputes these values of ops and conversions, and no others.

        What says where rows of experts go is saved, whatever is named: made again it might say otherwise. Seconds and
        bytes stay those that were predicted for this plan. Kernels are all that can stand: some of this plan's may not,
        as a kernel's results are all saved or all recomputed.
        """
        names = frozenset(values)
        others = {name: ops for name, ops in self.offloaded.items() if name not in names}
        states = states_of(names, passing or {}, self.regathered, others)
        return replace(self, states=states, fused=None if self.kernels else self.fused)

    def offloading(self, values: Mapping[str, tuple[str, str]]) -> Plan:
        """The plan in which these values of ops and conversions wait on the host for backward, and no others.

        Each has the op behind whose forward its memory is free, and the op before whose backward it begins to return.
        Seconds and bytes stay those that were predicted for this plan.
        """
        return replace(self, states=states_of(self.recomputed, self.passing, self.regathered, values))

    def _place_of(self, name: str) -> str:
        """The word of constraints for where a parameter lies."""
        if name in self.wholly_hosted:
            return "wholly"
        return "host" if name in self.hosted else "device"

    def _use_of(self, name: str, stored: str) -> str:
        """The only sharding in which a value is used, or `*` where there may be several."""
        arrives = {c.value[1].text(self.mesh.axes) for c in self.conversions if c.source == name}
        is_shared = any(c.source == f"{name}:shared" for c in self.conversions)
        # several uses may want several things; and a cast hands a parameter on under another name
        if self.decisions[name].kind == "parameter" and (self.precision or is_shared):
            arrives |= {"*", stored}
        if not arrives:
            return stored
        return arrives.pop() if len(arrives) == 1 else "*"

    # -- files

    def to_dict(self) -> dict[str, Any]:
        """The plan as data that JSON can hold."""
        return archive.written(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Plan:
        """The plan that `to_dict` wrote; a letter where the data is no plan.

        Whether it is a plan of some model is for `validate` to say.
        """
        plan = Plan(**archive.fields_of(Plan, data))
        archive.refuse_contradictions(plan)
        return plan

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON: data only."""
        archive.write(self, path)

    @staticmethod
    def load(path: str | Path) -> Plan:
        """The plan that `save` wrote; a letter where the file is none."""
        return Plan.from_dict(archive.read(path))

    def validate(
        self,
        model: torch.nn.Module,
        meta_inputs: Any = None,
        loss: Callable[..., Any] | None = None,
        assume: Any = None,
        outputs: str | Sequence[str] = "auto",
    ) -> None:
        """Raise a letter unless the plan's parameters are the model's.

        Given the inputs that it was made for, raise one unless all of it is a plan of the model on them, as
        `autoparallelize` does for a plan it is given.
        """
        if not hasattr(model, "named_parameters"):
            raise BadPlan(f"{model!r} is not a model")
        archive.refuse_contradictions(self)
        archive.refuse_other_parameters(self, dict(model.named_parameters(remove_duplicate=False)))
        if meta_inputs is not None:
            if Plan.check_graph is None:
                raise BadPlan("a plan is held against inputs by the compiler", advice="import autopar.api")
            Plan.check_graph(self, model, meta_inputs, loss, assume, outputs)


def _budgets_of(given: Any) -> int | list[int]:
    """The budgets of a curve, or their number; a letter for anything else."""
    each = list(given) if isinstance(given, Sequence) else [given]
    is_bytes = not isinstance(given, Sequence) and isinstance(given, int) and given > _MOST_BUDGETS
    if is_bytes or not each or any(isinstance(b, bool) or not isinstance(b, int) or b < 1 for b in each):
        advice = f"budgets=[{given}]" if is_bytes else "budgets=20, or budgets=[16 * 2**30, 8 * 2**30]"
        raise BadBudget(f"budgets={given!r} are not valid budgets for a curve", advice=advice)
    return each if isinstance(given, Sequence) else int(given)

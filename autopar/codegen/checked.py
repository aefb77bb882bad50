"""Check that a plan is legal for a graph before it is lowered.

What a program needs follows from the decisions; what the plan says beside them must agree:

    decisions     one for every site of the graph, each a choice that the rules of its op allow on this call
    conversions   one for every value that leaves its site in another sharding than it arrives in at the next, with
                  steps that lead from the one to the other, forward and backward; none for other values
    policies      regathering and early reduction only of parameters that are cut, and read
    kernels       only where they can stand for the ops of a group

A plan may have been edited, or written elsewhere: unchecked, a missing all-reduce would give every rank another loss.
Nothing is searched or priced here.
"""

from __future__ import annotations

from autopar.graph.graph import Graph, info, type_of
from autopar.letters import BadPlan
from autopar.sharding.convert import Step, leads_to
from autopar.sharding.layout import Layout
from autopar.sharding.mesh import DeviceMesh
from autopar.sharding.placement import Sharding
from autopar.sharding.strategies import Choice, gradients, values
from autopar.solver.decision import Conversion
from autopar.solver.plan import Plan
from autopar.solver.plan_of_choices import fused_of
from autopar.space.kernel_sites import KernelSites
from autopar.space.shardings import Use, sites_and_uses
from autopar.space.space import Site

_AGAIN = "plan again, or the file as autopar.plan wrote it"
_MOST_SHOWN = 6  # legal choices that a letter lists


def check_plan(graph: Graph, plan: Plan) -> None:
    """Raise `BadPlan` unless all decisions are legal for the graph and the rest follows from them."""
    if plan.digest != graph.digest:
        raise BadPlan(
            "the plan was made for another graph",
            seen=f"plan {plan.digest}, model {graph.digest}",
            advice=(
                "plan again: the model, its inputs' shapes, train and eval, or the outputs that are named have changed"
            ),
        )
    passes = plan.accumulation * plan.microbatches
    sites, uses = sites_and_uses(graph, plan.mesh, passes, plan.precision[1] if plan.precision else "")
    named = {site.name: site for site in sites}
    _decides(plan, named)
    _policies(plan, sites, uses)
    sizes = {name: type_of(node).nbytes for name, node in graph.parameters.items()}
    if dict(plan.parameter_bytes) != sizes:
        wrong = next(
            name for name in {**sizes, **plan.parameter_bytes} if plan.parameter_bytes.get(name) != sizes.get(name)
        )
        raise BadPlan(
            f"the plan was made for another model: parameter {wrong}",
            seen=(
                f"{plan.parameter_bytes.get(wrong, 'none')} bytes in the plan, {sizes.get(wrong, 'none')} in the model"
            ),
            advice=_AGAIN,
        )
    conversions = {(c.target, c.operand): c for c in plan.conversions}
    if len(conversions) < len(plan.conversions):
        raise BadPlan(
            "the plan converts a value twice",
            seen=f"{len(plan.conversions)} conversions of {len(conversions)} values",
            advice=_AGAIN,
        )
    for use in uses:
        _travels(plan, use, conversions.pop((use.target, use.operand), None), named[use.target])
    for target, operand in conversions:
        raise BadPlan(f"the plan converts operand {operand} of {target}, which the model does not have", advice=_AGAIN)
    _fuses(graph, plan)


def _decides(plan: Plan, named: dict[str, Site]) -> None:
    """Raise unless the plan takes a legal choice for every site, and decides nothing else."""
    if missing := [name for name in named if name not in plan.decisions]:
        raise BadPlan(
            f"the plan decides nothing for {missing[0]}",
            at=named[missing[0]].source,
            seen=f"{len(missing)} of {len(named)} sites are not decided",
            advice=_AGAIN,
        )
    if unknown := [name for name in plan.decisions if name not in named]:
        raise BadPlan(f"the plan decides for {unknown[0]}, which the model does not have", advice=_AGAIN)
    allowed: dict[int, frozenset[Choice]] = {}  # sites that are alike share their choices
    for name, decision in plan.decisions.items():
        site = named[name]
        if (decision.op, decision.kind) != (site.op, site.kind):
            raise BadPlan(
                f"the plan says that {name} is the {decision.kind} {decision.op}, and it is the {site.kind} {site.op}",
                at=site.source,
                advice=_AGAIN,
            )
        if id(site.choices) not in allowed:
            allowed[id(site.choices)] = frozenset(site.choices)
        if decision.choice not in allowed[id(site.choices)]:
            legal = list(dict.fromkeys(map(repr, site.choices)))
            raise BadPlan(
                f"the plan runs {name} as {decision.choice!r}, which "
                f"{site.op if site.kind == 'op' else f'a {site.kind}'} cannot on mesh {plan.mesh}",
                at=site.source,
                seen=f"legal are {', or '.join(legal[:_MOST_SHOWN])}"
                + (f", or one of {len(legal) - _MOST_SHOWN} others" if len(legal) > _MOST_SHOWN else ""),
                advice=_AGAIN,
            )


def _policies(plan: Plan, sites: tuple[Site, ...], uses: tuple[Use, ...]) -> None:
    """Raise where the plan regathers, or reduces per micro-batch, a parameter whose storage forbids it.

    A parameter with one cast is marked at the site of that cast.
    """
    casts = {use.target: use.source for use in uses}
    may: dict[str, set[str]] = {"regathered": set(), "scattered": set()}
    for site in sites:
        owner = site.name if site.kind == "parameter" else casts.get(site.name, "")
        for policy, marks in (("regathered", site.regathered), ("scattered", site.scattered)):
            if any(marked and site.choices[i] == plan.decisions[site.name].choice for i, marked in enumerate(marks)):
                may[policy].add(owner)
    for policy, said in (("regathered", plan.regathered), ("scattered", plan.scattered)):
        if wrong := sorted(said - may[policy]):
            raise BadPlan(
                f"the plan says that {wrong[0]} is {policy}, which is not possible for it in this plan",
                seen=f"{plan.accumulation * plan.microbatches} micro-batches a step",
                advice=_AGAIN,
            )


def _fuses(graph: Graph, plan: Plan) -> None:
    """Raise where a kernel of the plan cannot stand for its ops; a plan may fuse less than it could."""
    possible = fused_of(KernelSites.of(graph, plan.kernels), plan) if plan.fused else {}
    for result, family in (plan.fused or {}).items():
        if possible.get(result) != family:
            raise BadPlan(
                f"the plan has a kernel of {family} in the place of {result}, where none can stand",
                at=info(next(n for n in graph.nodes if info(n).key == result)).source,
                seen=f"one of {possible[result]} can" if result in possible else "",
                advice=_AGAIN,
            )


def _travels(plan: Plan, use: Use, conversion: Conversion | None, target: Site) -> None:
    """Raise unless a value is converted from its source's sharding to its target's, and its gradient back."""
    given = plan.decisions[use.source].choice.output(use.port)
    taken = plan.decisions[use.target].choice.operand(use.operand)
    what = f"from {use.source} to operand {use.operand} of {use.target}"
    due: list[_Due] = [("value", (values(given), values(taken)), conversion.forward if conversion else ())]
    if use.type.requires_grad:
        due.append(("gradient", (gradients(taken), gradients(given)), conversion.backward if conversion else ()))
        if not use.may_reduce and _reduces(*due[1][1]):
            raise BadPlan(
                f"the plan reduces the gradient {what} in {use.type.dtype}",
                at=target.source,
                seen=f"gradients of parameters are reduced in {plan.precision and plan.precision[1]}",
                advice=_AGAIN,
            )
    elif conversion is not None and (conversion.gradient is not None or conversion.backward):
        raise BadPlan(f"the plan converts a gradient {what}, and that value has none", at=target.source, advice=_AGAIN)
    if target.kind == "output" and use.operand > 0 and values(given) != values(taken):
        raise BadPlan(
            f"the plan carries {use.target} to the next call otherwise than it came",
            seen=f"{values(given).text(plan.mesh.axes)} and {values(taken).text(plan.mesh.axes)}",
            advice=_AGAIN,
        )
    if conversion is not None:
        _says_the_same(plan, use, conversion, due, target)
    for kind, (leaves, arrives), steps in due:
        end = Layout.of(use.type.shape, arrives, plan.mesh)
        if end is None or leads_to(steps, use.type.shape, leaves, plan.mesh) != end:
            raise BadPlan(
                f"the plan does not bring the {kind} {what} from {leaves.text(plan.mesh.axes)} to "
                f"{arrives.text(plan.mesh.axes)}",
                at=target.source,
                seen=", ".join(step.text(plan.mesh.axes) for step in steps) or "no step",
                advice=_AGAIN,
            )


# "value" or "gradient", where it leaves and arrives, and the steps between
_Due = tuple[str, tuple[Sharding, Sharding], tuple[Step, ...]]


def _reduces(leaves: Sharding, arrives: Sharding) -> bool:
    """Whether some axis goes from a partial sum to a placement that is whole or cut."""
    pairs = zip(leaves.placements, arrives.placements, strict=True)
    return any(a.is_partial and not b.is_partial for a, b in pairs)


def _says_the_same(plan: Plan, use: Use, conversion: Conversion, due: list[_Due], target: Site) -> None:
    """Raise unless a conversion's source and shardings are those that the decisions at its ends give."""
    said = [conversion.value, *([conversion.gradient] if conversion.gradient is not None else [])]
    decided = [ends for _, ends, _ in due]
    if conversion.source != use.source or said != decided:
        raise BadPlan(
            f"the plan says of the value from {use.source} to operand {use.operand} of {use.target} something "
            "else than its decisions",
            at=target.source,
            seen=f"decided {_ways(plan.mesh, decided)}; said {_ways(plan.mesh, said)} from {conversion.source}",
            advice=_AGAIN,
        )


def _ways(mesh: DeviceMesh, ends: list[tuple[Sharding, Sharding]]) -> str:
    return ", gradient ".join(f"{a.text(mesh.axes)} to {b.text(mesh.axes)}" for a, b in ends)

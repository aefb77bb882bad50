"""Predicted seconds of a training step beside measured ones.

A profile is measured, plans are listed in a file, then all of them run in turn.

    python -m benchmarks.times        calibrates, writes times_plans.json, measures; fails below a bar

Every figure of the profile comes from micro-benchmarks (`autopar calibrate`), with all four ranks running. Two plans
whose intervals overlap are not compared.
"""

from __future__ import annotations

import argparse
import copy
import fcntl
import gc
import hashlib
import json
import logging
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers

import autopar
from autopar import Cluster, DeviceMesh
from autopar.calibrate.calibration import calibrate
from autopar.calibrate.workloads import WORKLOADS
from autopar.letters import BadPreset
from autopar.sharding.mesh import DeviceMesh as Mesh
from autopar.solver import solve
from autopar.solver.plan_of_choices import plan_of
from autopar.solver.points import Points
from autopar.space.setting import Setting
from autopar.space.shardings import shardings
from autopar.testing import on_processes
from autopar.tracer import ColoTracer

HERE = Path(__file__).parent
RANKS, ROUNDS = 4, 4
UNTIMED, IN_A_ROW = 2, 3  # of each round, steps of a plan behind those of another, and steps that are timed then
# Bars, of a model: the least rank correlation, the fewest pairs that it is of, the largest share of pairs that are not
# told apart, and how much slower than the best of its plans the free one may be.
TAU, RESOLVED, UNRESOLVED, REGRET = 0.8, 25, 0.5, 0.03
# Bars, of all steps: the largest median error, and the least share within the printed intervals.
ERROR, WITHIN = 0.10, 0.90
MESHES = {"4": DeviceMesh((4,)), "2x2": DeviceMesh((2, 2), ("dp", "tp"))}


# -- models and plans


def gpt2() -> tuple[Any, dict[str, torch.Tensor]]:
    config = transformers.GPT2Config(
        n_layer=2,
        n_embd=256,
        n_head=8,
        n_positions=128,
        vocab_size=4096,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config), text(config.vocab_size, 8, 128)


def llama() -> tuple[Any, dict[str, torch.Tensor]]:
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=384,
        intermediate_size=1024,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=2048,
        max_position_embeddings=128,
    )
    return transformers.LlamaForCausalLM(config), text(config.vocab_size, 8, 128)


def vit() -> tuple[Any, dict[str, torch.Tensor]]:
    config = transformers.ViTConfig(
        num_hidden_layers=2,
        hidden_size=256,
        intermediate_size=1024,
        num_attention_heads=8,
        image_size=80,
        patch_size=8,
        num_labels=100,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.ViTForImageClassification(config), {
        "pixel_values": torch.randn(8, 3, 80, 80),
        "labels": torch.randint(0, 100, (8,)),
    }


def resnet() -> tuple[Any, dict[str, torch.Tensor]]:
    config = transformers.ResNetConfig(
        embedding_size=32, hidden_sizes=[64, 128], depths=[2, 2], layer_type="basic", num_labels=100
    )
    return transformers.ResNetForImageClassification(config), {
        "pixel_values": torch.randn(8, 3, 64, 64),
        "labels": torch.randint(0, 100, (8,)),
    }


def t5() -> tuple[Any, dict[str, torch.Tensor]]:
    config = transformers.T5Config(
        d_model=256, d_kv=32, d_ff=1024, num_layers=2, num_heads=8, vocab_size=4096, dropout_rate=0.0, use_cache=False
    )
    config.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(config), text(config.vocab_size, 8, 64)


def text(vocabulary: int, batch: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, vocabulary, (batch, length))
    return {"input_ids": ids, "labels": ids.clone()}


MODELS: dict[str, Callable[[], tuple[Any, dict[str, torch.Tensor]]]] = {
    "GPT-2": gpt2,
    "LLaMA": llama,
    "ViT": vit,
    "ResNet": resnet,
    "T5": t5,
}
ASSUME = {name: autopar.Assume(no_padding=True) for name in ("LLaMA", "T5")}
EXPERTS: tuple[tuple[str, Any], ...] = (
    ("4", None),
    ("4", "dp"),
    ("4", "zero1"),
    ("4", "zero3"),
    ("4", "megatron"),
    ("2x2", None),
    ("2x2", {"tensor": 2, "data": 2}),
    ("2x2", "2d"),
)
DRAWN = tuple((mesh, seed) for seed in (1, 2, 3, 4, 5) for mesh in ("4", "2x2"))
PLANS = 12  # of a model: experts' as far as they fit it, then drawn ones


def made(name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    return model.train(), batch


def plans(name: str, profile: Cluster) -> list[tuple[dict[str, Any], autopar.Plan]]:
    """What is to be run of one model: how each plan is made, and the plan."""
    model, batch = made(name)
    found = []
    for mesh, parallel in EXPERTS:
        try:
            plan = autopar.plan(
                model,
                batch,
                mesh=MESHES[mesh],
                cluster=profile,
                parallel=parallel,
                assume=ASSUME.get(name),
                memory_budget="inf",
            )
        except BadPreset:  # of matrices, for a model that has none
            continue
        found.append(({"mesh": mesh, "parallel": parallel or "free"}, plan))
    asked = {"cluster": profile, "assume": ASSUME.get(name), "memory_budget": "inf"}
    taken = autopar.plan(model, batch, mesh=RANKS, **asked).mesh.shape  # of all meshes of so many devices
    for how, plan in found:
        how["is_taken"] = how["parallel"] == "free" and plan.mesh.shape == taken
    graph = ColoTracer().trace(model, batch, assume=ASSUME.get(name))
    for mesh, seed in DRAWN[: PLANS - len(found)]:
        found.append(({"mesh": mesh, "seed": seed}, drawn(graph, MESHES[mesh], profile, seed)))
    return found


def drawn(graph: Any, mesh: Mesh, profile: Cluster, seed: int) -> autopar.Plan:
    """A legal plan that random costs make the cheapest, at the profile's prices."""
    space, rng = shardings(graph, Setting(mesh, profile)), np.random.default_rng(seed)
    sites = tuple(replace(s, seconds=rng.random(len(s.choices))) for s in space.sites)
    edges = tuple(
        replace(e, seconds=np.where(np.isfinite(e.seconds), rng.random(e.seconds.shape), np.inf)) for e in space.edges
    )
    plan = solve(replace(space, sites=sites, edges=edges, windows=(), memory=None))
    picked = [s.choices.index(plan.decisions[s.name].choice) for s in space.sites]
    return plan_of(space, Points(space).of(picked), 0.0)


def digest(plan: autopar.Plan) -> str:
    return hashlib.sha256(json.dumps({n: repr(d.choice) for n, d in plan.decisions.items()}).encode()).hexdigest()[:12]


# -- measuring


def profile_of(rank: int, meshes: list[Mesh], lock: str) -> Cluster:
    """One profile for meshes of several shapes, whose process groups all stand, as they do when plans are measured."""
    for mesh in meshes:
        mesh.to_torch("cpu")
    with Turns(lock if rank == 0 else ""):
        found = [calibrate(mesh, "cpu", "here", workloads=WORKLOADS if i == 0 else ()) for i, mesh in enumerate(meshes)]
    return replace(found[0], measured=tuple(m for cluster in found for m in cluster.measured))


def measure(rank: int, everyone: list[tuple[str, list[dict[str, Any]]]], rounds: int, lock: str) -> list[list[float]]:
    """Seconds of a training step of the slowest rank.

    Of each plan of each model, in rounds that run all of a model's in turn: of each some steps that are not timed, then
    some that are.
    """
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    turns, of_models = Turns(lock if rank == 0 else ""), []
    for name, given in everyone:
        model, batch = made(name)
        of_models.append(
            [
                stepper(
                    autopar.autoparallelize(
                        copy.deepcopy(model), batch, plan=autopar.Plan.from_dict(data), assume=ASSUME.get(name)
                    ),
                    batch,
                )
                for data in given
            ]
        )
        for step in of_models[-1]:
            step()  # its states are there from now on
    gc.collect()
    gc.disable()
    taken: list[list[float]] = []
    order = np.random.default_rng(0)
    with turns:
        for steps in of_models:
            seconds: list[list[float]] = [[] for _ in steps]
            for i in range(-1, rounds):  # the first warms up
                for k in order.permutation(len(steps)):
                    for _ in range(UNTIMED):
                        steps[k]()  # its memory and its code are at hand from now on, as in training
                    for _ in range(IN_A_ROW):
                        dist.barrier()
                        start = time.perf_counter()
                        steps[k]()
                        slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
                        dist.all_reduce(slowest, dist.ReduceOp.MAX)
                        if i >= 0:
                            seconds[k].append(slowest.item())
            taken += seconds
    return taken


def stepper(model: Any, batch: dict[str, torch.Tensor]) -> Callable[[], None]:
    """A training step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()

    return step


class Turns:
    """Several who measure on one machine take turns.

    A file is locked by all while they prepare, by one alone while it times.
    """

    def __init__(self, path: str) -> None:
        self.file = open(path, "a") if path else None  # noqa: SIM115 - it is open as long as the lock is held
        self._lock(fcntl.LOCK_SH)

    def _lock(self, how: int) -> None:
        if self.file:
            fcntl.flock(self.file, how)

    def __enter__(self) -> None:
        dist.barrier()  # all have prepared
        self._lock(fcntl.LOCK_EX)
        dist.barrier()

    def __exit__(self, *_: object) -> None:
        dist.barrier()
        self.end()

    def end(self) -> None:
        if self.file:
            self.file.close()


def interval(taken: list[float]) -> tuple[float, float, float]:
    """The median, and where it lies with 95 % by the order of what was taken."""
    ordered, n = sorted(taken), len(taken)
    tails = np.cumsum([math.comb(n, k) / 2**n for k in range(n)])
    k = max(0, int((tails <= 0.025).sum()) - 1)
    return statistics.median(ordered), ordered[k], ordered[n - 1 - k]


# -- what it says


@dataclass(frozen=True)
class Judged:
    """Of a model: what its plans were predicted to take beside what they took.

    A row is a plan: its name, its mesh, predicted seconds, measured ones, and their interval.
    """

    name: str
    rows: list[tuple[str, str, float, float, float, float]]  # by measured seconds
    within: int  # steps in the intervals that plans print
    regret: float  # of the plan that `mesh=4` takes, which has the mesh to choose too

    @staticmethod
    def of(name: str, listed: list[dict[str, Any]], seconds: list[list[float]]) -> Judged:
        """The plans of a model as `times_plans.json` has them, and of each the seconds of its steps."""
        rows, within, free = [], 0, math.inf
        for plan, taken in zip(listed, seconds, strict=True):
            middle, *ends = interval(taken)
            rows.append((_name(plan), plan["mesh"], plan["predicted_s"], middle, *ends))
            low, high = plan["interval_s"]
            within += low <= middle <= high
            if plan.get("is_taken"):
                free = middle
        rows.sort(key=lambda row: row[3])
        return Judged(name, rows, within, free / rows[0][3] - 1)

    @property
    def errors(self) -> list[float]:
        """Absolute relative errors of the predicted seconds."""
        return [abs(row[2] / row[3] - 1) for row in self.rows]

    @property
    def pairs(self) -> list[tuple[Any, Any]]:
        """Every two plans."""
        return list(combinations(self.rows, 2))

    @property
    def resolved(self) -> list[tuple[float, float]]:
        """Pairs whose measured intervals are apart: the difference of predicted seconds, and of measured ones."""
        return [(a[2] - b[2], a[3] - b[3]) for a, b in self.pairs if a[5] < b[4] or b[5] < a[4]]

    def below(self) -> list[str]:
        """Its own bars that it misses."""
        tau, resolved, every = kendall(self.resolved), len(self.resolved), len(self.pairs)
        missed = []
        if not tau >= TAU or resolved < max(RESOLVED, UNRESOLVED * every):
            missed.append(f"{self.name}: Kendall {tau:.3f}, {resolved} of {every} pairs")
        if self.regret > REGRET:
            missed.append(f"{self.name}: the free plan is {self.regret:.1%} slower than the best")
        return missed

    def __str__(self) -> str:
        lines = [
            f"| {self.name} | mesh | predicted | measured | interval | predicted / measured |",
            "|---|---|---|---|---|---|",
        ]
        for what, mesh, predicted, middle, low, high in self.rows:
            lines.append(
                f"| {what} | {mesh} | {predicted * 1e3:.0f} ms | {middle * 1e3:.0f} ms | {low * 1e3:.0f} to "
                f"{high * 1e3:.0f} | {predicted / middle:.2f} |"
            )
        return "\n".join(lines) + (
            f"\n\n{self.name}: Kendall {kendall(self.resolved):.3f} over {len(self.resolved)} of {len(self.pairs)} "
            f"pairs; median absolute relative error {statistics.median(self.errors):.1%}\n\n{self.within} of "
            f"{len(self.rows)} measured steps within the printed intervals; regret of the free plan {self.regret:.1%}\n"
        )


def missed(models: list[Judged]) -> list[str]:
    """Bars that models miss, each by itself and all together."""
    error = statistics.median(e for model in models for e in model.errors)
    within, steps = sum(model.within for model in models), sum(len(model.rows) for model in models)
    found = [line for model in models for line in model.below()]
    if error > ERROR:
        found.append(f"median error {error:.1%}")
    if within < WITHIN * steps:
        found.append(f"{within} of {steps} steps within the printed intervals")
    return found


def _name(how: dict[str, Any]) -> str:
    return str(how.get("parallel", f"drawn, seed {how.get('seed')}"))


def kendall(pairs: list[tuple[float, float]]) -> float:
    """Pairs in the same order less those in the other, as a share; of each pair the differences of both figures."""
    return float(np.mean([np.sign(a) * np.sign(b) for a, b in pairs])) if pairs else float("nan")


def picture(scatter: dict[str, list[Any]]) -> str:
    """Predicted against measured seconds as SVG, both by powers of ten.

    The bars are intervals, on the line they are equal.
    """
    side, edge, colours = 480, 60, ("#1b6ca8", "#c8553d", "#3a7d44", "#7b4fa3", "#b08900")
    figures = [v for rows in scatter.values() for r in rows for v in (r[2], r[4], r[5])]
    low, high = math.log10(min(figures)) - 0.05, math.log10(max(figures)) + 0.05

    def x(seconds: float) -> float:
        return edge + (math.log10(seconds) - low) / (high - low) * side

    def y(seconds: float) -> float:
        return 2 * edge / 3 + side - (x(seconds) - edge)

    ticks = [m * 10.0**e for e in range(-4, 3) for m in (1, 2, 5) if low <= math.log10(m * 10.0**e) <= high]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{side + 2 * edge}" height="{side + 2 * edge}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<line x1="{x(10**low):.1f}" y1="{y(10**low):.1f}" x2="{x(10**high):.1f}" y2="{y(10**high):.1f}" '
        'stroke="#999"/>',
    ]
    for t in ticks:
        lines += [
            f'<line x1="{x(t):.1f}" y1="{y(10**low):.1f}" x2="{x(t):.1f}" y2="{y(10**high):.1f}" '
            f'stroke="#eee"/><text x="{x(t):.1f}" y="{y(10**low) + 16:.1f}" text-anchor="middle">{t:g}</text>',
            f'<line x1="{x(10**low):.1f}" y1="{y(t):.1f}" x2="{x(10**high):.1f}" y2="{y(t):.1f}" '
            f'stroke="#eee"/><text x="{edge - 6}" y="{y(t) + 4:.1f}" text-anchor="end">{t:g}</text>',
        ]
    for k, (name, rows) in enumerate(scatter.items()):
        for what, _, predicted, middle, least, most in rows:
            mark = (
                f'<rect x="{x(middle) - 3.5:.1f}" y="{y(predicted) - 3.5:.1f}" width="7" height="7"'
                if what.startswith("drawn")
                else f'<circle cx="{x(middle):.1f}" cy="{y(predicted):.1f}" r="4"'
            ) + f' fill="{colours[k % 5]}"/>'
            lines.append(
                f'<line x1="{x(least):.1f}" y1="{y(predicted):.1f}" x2="{x(most):.1f}" y2="{y(predicted):.1f}" '
                f'stroke="{colours[k % 5]}"/>{mark}'
            )
        lines.append(f'<text x="{edge + 10}" y="{60 + 18 * k}" fill="{colours[k % 5]}">{name}</text>')
    lines += [
        f'<text x="{edge + side / 2}" y="{side + edge * 5 / 3:.0f}" text-anchor="middle">measured, s a step (bar: '
        "95 % interval; square: a plan drawn at random)</text>",
        f'<text transform="translate(16 {edge + side / 2}) rotate(-90)" text-anchor="middle">predicted, s a '
        "step</text>",
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--calibrate-only", action="store_true")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--profile", help="a profile measured before, instead of calibrating")
    parser.add_argument(
        "--out", type=Path, default=HERE, help="the folder of times_profile.json, times_plans.json, times.svg"
    )
    parser.add_argument("--lock", default="", help="a file by which several who measure take turns")
    asked = parser.parse_args()
    path = asked.out / "times_profile.json"
    if asked.profile:
        path = Path(asked.profile)
    else:
        on_processes(RANKS, profile_of, list(MESHES.values()), asked.lock, timeout_s=1800.0)[0].save(path)
    profile = Cluster.of(path)
    if asked.calibrate_only:
        return
    turns = Turns(asked.lock)
    chosen = {name: plans(name, profile) for name in asked.models}
    turns.end()
    listed = {
        name: [
            {
                **how,
                "decisions": digest(plan),
                "predicted_s": plan.step_time_s,
                "interval_s": list(plan.step_interval_s),
            }
            for how, plan in of
        ]
        for name, of in chosen.items()
    }
    (asked.out / "times_plans.json").write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")
    print(
        f"torch {torch.__version__}, {RANKS} gloo ranks of one thread each on {os.cpu_count()} cores; AdamW; "
        f"{asked.rounds} rounds in a random order, of each plan {UNTIMED} steps and then {IN_A_ROW} that are timed; "
        "95 % intervals of the median\n"
    )
    everyone = [(name, [plan.to_dict() for _, plan in of]) for name, of in chosen.items()]
    measured = on_processes(RANKS, measure, everyone, asked.rounds, asked.lock, timeout_s=3000.0)[0]
    (asked.out / "times_measured.json").write_text(json.dumps(measured) + "\n", encoding="utf-8")
    taken = iter(measured)
    models = [Judged.of(name, of, [next(taken) for _ in of]) for name, of in listed.items()]
    for model in models:
        print(model, flush=True)
    ratios = [row[3] / row[2] for model in models for row in model.rows]
    low, middle, high = np.quantile(ratios, [0.05, 0.5, 0.95])
    error = statistics.median(e for model in models for e in model.errors)
    print(f"measured by predicted: median {middle:.2f}, nine of ten between {low:.2f} and {high:.2f}")
    print(f"all models: median absolute relative error {error:.1%}")
    (asked.out / "times.svg").write_text(picture({model.name: model.rows for model in models}), encoding="utf-8")
    if below := missed(models):
        sys.exit(f"below the bar: {below}")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    main()

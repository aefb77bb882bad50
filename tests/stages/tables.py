"""Torch's tables of orders, made from stubs of stages, and a simulation that shares nothing with ours."""

from __future__ import annotations

import math
import random
from functools import cache
from types import SimpleNamespace

from torch.distributed.pipelining import schedules

from autopar.stages import Action, Order, Prices, StagePrices

_KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def torch_order(name: str, p: int, n: int, each: int = 1) -> Order:
    """The table that torch's schedule of that name makes for its ranks, without gaps."""
    count = p * each

    def stub(i: int) -> SimpleNamespace:
        of = {"stage_index": i, "num_stages": count, "group_size": p, "group_rank": 0, "has_backward": True}
        ends = {"is_first": i == 0, "is_last": i == count - 1}
        return SimpleNamespace(**of, **ends, stage_index_to_group_rank=None, submod=None)

    make = schedules.get_schedule_class(name)
    if each == 1:
        made = make(stub(0), n_microbatches=n, loss_fn=lambda *_: None)
        table, place = made._get_pipeline_order(), range(p)
    else:
        own = (0, count - 1) if name in ("ZBVZeroBubble", "DualPipeV") else range(0, count, p)
        made = make([stub(i) for i in own], n_microbatches=n, loss_fn=lambda *_: None)
        table, place = made.pipeline_order, [made.stage_index_to_group_rank[i] for i in range(count)]
    flat = [[part for one in table[r] if one is not None for part in one.sub_actions or (one,)] for r in range(p)]
    kept = [[one for one in row if one.computation_type.name in _KINDS] for row in flat]
    return Order(
        tuple(place),
        n,
        tuple(
            tuple(Action(_KINDS[one.computation_type.name], one.stage_index, one.microbatch_index) for one in row)
            for row in kept
        ),
    )


def seconds(order: Order, prices: Prices) -> float:
    """When the last action ends, by the definition: infinite where actions wait for each other."""
    at = {(a.kind, a.stage, a.turn): (r, k) for r, row in enumerate(order.actions) for k, a in enumerate(row)}
    hops = prices.transfer if isinstance(prices.transfer, tuple) else [prices.transfer] * order.stages
    open_ones: set[tuple[int, int]] = set()

    @cache
    def end(r: int, k: int) -> float:
        if (r, k) in open_ones:
            return math.inf
        open_ones.add((r, k))
        action = order.actions[r][k]
        start = end(r, k - 1) if k else 0.0
        step = {"F": -1, "W": 0}.get(action.kind, 1)
        other = action.stage + step
        if step and 0 <= other < order.stages:
            c, j = next(
                at[kind, other, action.turn]
                for kind in "FBI"
                if (kind == "F") == (step < 0) and (kind, other, action.turn) in at
            )
            start = max(start, end(c, j) + (hops[min(other, action.stage)] if c != r else 0.0))
        price = prices.stages[action.stage]
        parts = {"F": price.forward, "I": price.inward, "W": price.weights, "B": price.inward + price.weights}
        open_ones.discard((r, k))
        return start + parts[action.kind]

    return max(end(r, len(row) - 1) for r, row in enumerate(order.actions))


def equal_prices(stages: int, part: float = 1.0) -> Prices:
    return Prices((StagePrices(part, part, part),) * stages)


def drawn_prices(draw: random.Random, stages: int) -> Prices:
    """Prices and transfers, each stage and border with its own."""
    of = tuple(StagePrices(*(draw.uniform(0.3, 2.0) for _ in range(3))) for _ in range(stages))
    return Prices(of, tuple(draw.uniform(0.0, 0.5) for _ in range(stages - 1)))

"""`Schedule` of a chain of three blocks by hand: windows, and how their parameters travel."""

from __future__ import annotations

import torch
from torch import nn

from autopar.graph.graph import info
from autopar.space.schedule import Transit, schedule_of
from autopar.tracer import ColoTracer

WEIGHT = 4 * 4 * 4  # bytes of a block's weight
#         x  block 0   relu  block 1   relu  block 2   relu  sum
#         0  1         2     3         4     5         6     7
BACK = 15  # op i has its backward at 15 - i


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = torch.relu(block(x))
        return x.sum()


def scheduled(least):
    graph = ColoTracer().trace(Chain(), {"x": torch.randn(2, 4)})
    schedule = schedule_of([n for n in graph.nodes if info(n).kind == "op"], least)
    return schedule, [graph.parameters[f"blocks.{i}.weight"] for i in range(3)]


def test_a_window_ends_with_the_block_that_fills_it():
    """What follows the last block reads nothing, and goes to its window."""
    each, _ = scheduled(WEIGHT)
    assert each.spans == ((0, 1), (2, 3), (4, 7)) and each.of == (0, 0, 1, 1, 2, 2, 2, 2)
    assert each.ends == (1, 3, 5)  # the last op of each that reads a parameter
    assert scheduled(WEIGHT + 1)[0].spans == ((0, 3), (4, 7))  # two blocks fill one, the third is left over
    assert scheduled(3 * WEIGHT + 1)[0].spans == ((0, 7),)


def test_a_window_is_gathered_and_reduced_beside_the_one_before():
    schedule, (first, second, third) = scheduled(WEIGHT)
    assert schedule.gather(1, first) == Transit(None, 1, 1, is_shared=False)  # nothing runs before
    assert schedule.gather(3, second) == Transit(0, 0, 2)
    assert schedule.gather(5, third) == Transit(1, 2, 4)
    assert schedule.reduction(5) == Transit(1, BACK - 5, BACK - 2)
    assert schedule.reduction(3) == Transit(0, BACK - 3, BACK - 0)
    assert schedule.reduction(1) == Transit(None, BACK - 1, BACK - 1)  # nothing runs behind


def test_backward_gathers_a_window_again_beside_the_one_behind():
    schedule, (first, second, third) = scheduled(WEIGHT)
    assert schedule.gather_again(5, third) == Transit(None, BACK - 5, BACK - 5, is_shared=False)
    assert schedule.gather_again(3, second) == Transit(2, BACK - 5, BACK - 3)
    assert schedule.gather_again(1, first) == Transit(1, BACK - 3, BACK - 1)
    assert schedule.stays == {third}  # what forward gathered last is there when backward begins


def test_in_line_a_parameter_shares_the_message_of_those_that_move_with_it():
    schedule, (first, *_) = scheduled(WEIGHT + 1)
    assert schedule.gather(1, first) == Transit(None, 1, 1, is_shared=True)  # with the second block's
    assert schedule.moving({first}).gather(1, first) == Transit(None, 1, 1, is_shared=False)


def test_a_bucket_waits_for_its_members_that_move():
    schedule, (first, second, third) = scheduled(3 * WEIGHT + 1)
    assert [schedule.buckets[p] for p in (first, second, third)] == [(1, 5)] * 3
    moving = schedule.moving({second, third})
    assert [moving.buckets[p] for p in (second, third)] == [(3, 5)] * 2
    assert moving.gather(3, second) == Transit(None, 3, 3, is_shared=True)
    assert moving.gather_again(3, second) == Transit(None, BACK - 5, BACK - 5, is_shared=True)

"""Seconds of an order are those of the definition."""

from __future__ import annotations

import random

import pytest

from autopar.letters import BadOrder
from autopar.stages import ORDERS, Order, Prices, StagePrices, order_of, simulated
from tests.stages.tables import drawn_prices, equal_prices, seconds


def test_seconds_are_those_of_the_definition():
    draw = random.Random(1)
    for name in ORDERS:
        for _ in range(6):
            order = order_of(name, draw.randint(1, 4), draw.randint(1, 6), draw.randint(1, 2))
            prices = drawn_prices(draw, order.stages)
            assert simulated(order, prices).seconds == pytest.approx(seconds(order, prices))


def test_a_run_by_hand():
    """Two stages, two turns: F and B of 1 and 2 seconds, 3 and 4 on the second, a transfer of .5."""
    order = Order.of((0, 1), 2, ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"))
    run = simulated(order, Prices((StagePrices(1, 0, 2), StagePrices(3, 1, 3)), 0.5))
    assert run.starts == ((0, 1, 9, 16), (1.5, 4.5, 8.5, 11.5))
    assert run.ends == ((1, 2, 11, 18), (4.5, 8.5, 11.5, 15.5))
    assert run.seconds == 18 and run.idle == pytest.approx(1 - (2 * 3 + 2 * 7) / 36)
    assert run.in_flight == run.saved == (2, 1) and run.kept == (0, 0)


def test_turns_between_the_parts_of_a_backward_are_counted():
    order = order_of("zero-bubble", 4, 8)
    run = simulated(order, equal_prices(4))
    assert run.saved == (4, 3, 2, 1) and run.kept == (1, 2, 3, 4) and run.in_flight == (4, 4, 4, 4)
    assert order.most_held([10, 10, 10, 10], [7, 7, 7, 7]) == (40, 37, 34, 31)


def test_what_is_on_one_coordinate_takes_no_transfer():
    order = order_of("zb-v", 2, 1)  # stages 1 and 2 are on one coordinate
    one = Prices((StagePrices(1, 1, 1),) * 4)
    assert simulated(order, Prices(one.stages, (0.0, 9.0, 0.0))).seconds == simulated(order, one).seconds
    assert simulated(order, Prices(one.stages, (9.0, 0.0, 0.0))).seconds == simulated(order, one).seconds + 18


def test_a_stage_before_which_nothing_is_trained_makes_nobody_wait():
    """The first stage's backward is W alone: the order with I and W in the place of B takes as long."""
    prices = Prices((StagePrices(1, 0, 2), StagePrices(1, 1, 1)))
    split, whole = order_of("zero-bubble", 2, 4, caps=(2, 1)), order_of("1f1b", 2, 4)
    assert simulated(split, prices).seconds <= simulated(whole, prices).seconds


def test_an_order_that_waits_for_ever_is_refused():
    order = Order.of((0, 1), 2, ("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"))
    with pytest.raises(BadOrder, match="for ever"):
        simulated(order, equal_prices(2))

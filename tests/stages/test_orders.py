"""Orders that others published are made as they were, and serve any number of turns."""

from __future__ import annotations

import itertools
import random

import pytest

from autopar.letters import AutoparError
from autopar.stages import ORDERS, Action, Order, order_of, prove, simulated
from tests.stages.tables import drawn_prices, equal_prices, torch_order

SIZES = [(p, n) for p in (2, 3, 4) for n in (p, 2 * p, 4 * p)]


def same(ours: Order, torchs: Order) -> bool:
    return ours.place == torchs.place and ours.texts() == torchs.texts()


@pytest.mark.parametrize("p, n", SIZES)
def test_orders_are_those_of_torch(p, n):
    one = torch_order("1F1B", p, n)
    assert order_of("1f1b", p, n).texts()[:-1] == one.texts()[:-1]  # torch's last rank runs all forwards but F0 first
    for each in (2, 3):
        assert same(order_of("interleaved", p, n, each), torch_order("Interleaved1F1B", p, n, each))
        assert same(order_of("zero-bubble", p, n, each), torch_order("InterleavedZeroBubble", p, n, each))
    assert same(order_of("zb-v", p, n), torch_order("ZBVZeroBubble", p, n, 2))
    if n >= 2 * p:  # torch refuses fewer turns
        assert same(order_of("dualpipe-v", p, n), torch_order("DualPipeV", p, n, 2))


def test_rounds_of_more_turns_than_coordinates_are_those_of_torch():
    assert same(order_of("interleaved", 4, 10, 2), torch_order("Interleaved1F1B", 4, 10, 2))
    assert same(order_of("interleaved", 4, 3, 2), torch_order("Interleaved1F1B", 4, 3, 2))


@pytest.mark.parametrize("p, n", [(4, 8), (4, 16), (8, 16), (8, 32)])
def test_times_are_those_of_the_formulas(p, n):
    def time(name: str, each: int = 1) -> float:
        order = order_of(name, p, n, each)
        return simulated(order, equal_prices(order.stages, p / order.stages)).seconds

    assert time("gpipe") == time("1f1b") == 3 * (n + p - 1)
    assert time("zero-bubble") == 3 * n + p - 1
    assert time("interleaved", 2) == 3 * n + 3 * (p - 1) / 2
    assert time("zb-v") == time("dualpipe-v") == time("zero-bubble", 2) == 3 * n + (p - 1) / 2


@pytest.mark.parametrize("name", ORDERS)
def test_any_number_of_turns_is_served(name):
    for p, n, each in itertools.product((1, 2, 3, 5), (1, 2, 3, 4, 7, 9), (1, 2, 3)):
        prove(order_of(name, p, n, each))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ORDERS)
def test_any_number_of_turns_and_coordinates_is_served(name):
    for p, n, each in itertools.product(range(1, 9), range(1, 20), (1, 2, 3, 4)):
        prove(order_of(name, p, n, each))


def test_turns_in_flight_are_the_published_ones():
    def held(name: str, each: int = 1) -> list[float]:
        order = order_of(name, 4, 8, each)
        return [count * 4 / order.stages for count in simulated(order, equal_prices(order.stages)).in_flight]

    assert held("gpipe") == [8] * 4 and held("1f1b") == [4, 3, 2, 1] and held("zero-bubble") == [4] * 4
    assert held("interleaved", 2) == [5.5, 4.5, 3.5, 2.5]
    assert held("zb-v") == [4] * 4 and held("dualpipe-v") == [4.5] * 4


@pytest.mark.parametrize("p, n", [(2, 8), (4, 8), (5, 20), (8, 16), (11, 33), (16, 32)])
def test_orders_of_little_memory_hold_and_wait_what_their_paper_says(p, n):
    """arXiv 2405.15362: about half of 1F1B's memory and wait, and a third of its memory at two thirds of its wait."""
    for name, held, least, most in (("v-half", p // 2 + 1, 0.4, 0.5), ("v-min", (p + 4) // 3, 0.5, 0.75)):
        run = simulated(order_of(name, p, n), equal_prices(2 * p, 0.5))
        assert max(run.in_flight) / 2 == held
        assert least <= (run.seconds - 3 * n) / (3 * (p - 1)) <= most


@pytest.mark.parametrize("name", ("1f1b", "zero-bubble", "greedy"))
def test_caps_are_kept_to(name):
    draw = random.Random(5)
    for _ in range(20):
        caps = [draw.randint(1, 5) for _ in range(4)]
        order = order_of(name, 4, draw.randint(1, 9), prices=drawn_prices(draw, 4), caps=caps)
        assert all(held <= cap for held, cap in zip(prove(order, caps).in_flight, caps))


def test_texts_are_read_back():
    order = order_of("zb-v", 3, 5)
    assert Order.of(order.place, order.turns, order.texts()) == order
    assert Action.of("12W30") == Action("W", 12, 30) and str(Action("W", 12, 30)) == "12W30"
    with pytest.raises(AutoparError, match="not an action"):
        Action.of("0X3")
    with pytest.raises(AutoparError, match="did you mean 'zb-v'"):
        order_of("zbv", 2, 2)
    with pytest.raises(AutoparError, match="holds fewer turns"):
        order_of("zb-v", 2, 2, caps=[1, 1])

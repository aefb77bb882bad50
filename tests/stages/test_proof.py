"""Legal orders are proven, and every planted fault is refused by name."""

from __future__ import annotations

import random
import re
from collections import defaultdict

import networkx
import pytest

from autopar.letters import BadOrder
from autopar.stages import Action, Order, order_of, prove

FAULTS = ("loss", "double", "early", "swap")


def neighbours(action: Action, stages: int) -> tuple[int | None, int | None]:
    """The stage that an action reads from, and the one that it gives to."""
    if action.kind == "W":
        return None, None
    step = 1 if action.kind == "F" else -1
    source, reader = action.stage - step, action.stage + step
    return (source if 0 <= source < stages else None), (reader if 0 <= reader < stages else None)


def drawn_order(draw: random.Random) -> Order:
    """A legal order: coordinates take turns at random, with whatever may run and is next in its channel."""
    p = draw.randint(1, 3)
    place = [*range(p), *(draw.randrange(p) for _ in range(draw.randint(0, 3)))]
    draw.shuffle(place)
    stages, n = len(place), draw.randint(1, 4)
    waiting = {Action("F", s, t) for s in range(stages) for t in range(n)}
    waiting |= {Action(k, s, t) for s in range(stages) for t in range(n) for k in draw.choice(("B", "IW"))}
    done: set[tuple[str, int, int]] = set()
    queues: dict[tuple[int, int, bool], list[Action]] = defaultdict(list)
    rows: list[list[Action]] = [[] for _ in range(p)]

    def channel(action: Action, source: int) -> list[Action]:
        return queues[place[source], place[action.stage], action.kind == "F"]

    def may_run(a: Action) -> bool:
        source, _ = neighbours(a, stages)
        before = {"F": "", "B": "F", "I": "F", "W": "I"}[a.kind]
        if before and (before, a.stage, a.turn) not in done:
            return False
        if source is None:
            return True
        is_there = any((kind, source, a.turn) in done for kind in ("F" if a.kind == "F" else "BI"))
        message = source, a.turn
        return is_there and (place[source] == place[a.stage] or channel(a, source)[0] == message)

    while waiting:
        action = draw.choice(sorted((a for a in waiting if may_run(a)), key=str))
        waiting.remove(action)
        rows[place[action.stage]].append(action)
        done.add((action.kind, action.stage, action.turn))
        source, reader = neighbours(action, stages)
        if source is not None and place[source] != place[action.stage]:
            channel(action, source).pop(0)
        if reader is not None and place[reader] != place[action.stage]:
            queues[place[action.stage], place[reader], action.kind == "F"].append((action.stage, action.turn))
    return Order(tuple(place), n, tuple(map(tuple, rows)))


def with_row(order: Order, r: int, row: list[Action]) -> Order:
    return Order(order.place, order.turns, (*order.actions[:r], tuple(row), *order.actions[r + 1 :]))


def planted(draw: random.Random, order: Order, fault: str) -> tuple[Order, int, set[Action]] | None:
    """The order with one fault, the coordinate that has it, and the actions of which one has to be named."""
    r = draw.randrange(order.coordinates)
    row = list(order.actions[r])
    k = draw.randrange(len(row))
    action = row[k]
    if fault == "loss":
        return with_row(order, r, row[:k] + row[k + 1 :]), r, {action, *_following(row, action)}
    if fault == "double":
        row.insert(draw.randint(k + 1, len(row)), action)
        return with_row(order, r, row), r, {action}
    before = next((a for a in row[:k] if (a.stage, a.turn) == (action.stage, action.turn)), None)
    if fault == "early":
        if before is None:
            return None
        row.insert(row.index(before), row.pop(k))
        return with_row(order, r, row), r, {action}
    far = [s for s in neighbours(action, order.stages) if s is not None and order.place[s] != r]
    like = [j for j, a in enumerate(row) if (a.stage, a.kind in "BI") == (action.stage, action.kind in "BI") and j != k]
    like = [j for j in like if row[j].kind in ("F" if action.kind == "F" else "BI")]
    if not far or not like:
        return None
    j = draw.choice(like)
    row[j], row[k] = row[k], row[j]
    return with_row(order, r, row), r, {row[j], row[k], *_following(row, row[j]), *_following(row, row[k])}


def _following(row: list[Action], action: Action) -> list[Action]:
    """What of the same stage and turn runs after an action: it is then the one that runs too early."""
    of = action.stage, action.turn
    return [a for a in row if (a.stage, a.turn) == of and "FBIW".index(a.kind) > "FBIW".index(action.kind)]


def is_legal(order: Order) -> bool:
    """Oracle for orders that are complete: a graph without cycle, and channels that match."""
    graph = networkx.DiGraph()
    at = {}
    for row in order.actions:
        networkx.add_path(graph, row)
        at |= {("B" if a.kind == "I" else a.kind, a.stage, a.turn): a for a in row}
        of_turns = {(a.kind, a.stage, a.turn): a for a in row}
        for a in row:
            graph.add_node(a)
            before = {"B": "F", "I": "F", "W": "I"}.get(a.kind)
            if before:
                graph.add_edge(of_turns[before, a.stage, a.turn], a)
    sides: dict[bool, dict] = {True: defaultdict(list), False: defaultdict(list)}
    for r, row in enumerate(order.actions):
        for a in row:
            for is_sent, other in zip((False, True), neighbours(a, order.stages)):
                if other is None:
                    continue
                b = at["F" if a.kind == "F" else "B", other, a.turn]
                graph.add_edge(*((a, b) if is_sent else (b, a)))
                c = order.place[other]
                if c != r:
                    ends, message = ((r, c), (a.stage, other)) if is_sent else ((c, r), (other, a.stage))
                    sides[is_sent][ends, a.kind == "F"].append((message, a.turn))
    return networkx.is_directed_acyclic_graph(graph) and sides[True] == sides[False]


@pytest.mark.parametrize("count, seed", [(400, 1), pytest.param(10_000, 2, marks=pytest.mark.nightly)])
def test_legal_orders_are_proven(count, seed):
    draw = random.Random(seed)
    for _ in range(count):
        prove(drawn_order(draw))


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("count, seed", [(200, 3), pytest.param(2_500, 4, marks=pytest.mark.nightly)])
def test_a_planted_fault_is_refused_by_name(fault, count, seed):
    draw = random.Random(seed)
    tried = 0
    while tried < count:
        found = planted(draw, drawn_order(draw), fault)
        if found is None:
            continue
        order, r, actions = found
        tried += 1
        with pytest.raises(BadOrder) as caught:
            prove(order)
        words = re.findall(r"coordinate \d+|\d+[FBIW]\d+", str(caught.value))
        assert f"coordinate {r}" in words and {str(action) for action in actions} & {*words}, str(caught.value)


@pytest.mark.parametrize("count, seed", [(300, 5), pytest.param(10_000, 6, marks=pytest.mark.nightly)])
def test_the_verdict_on_any_exchange_of_two_actions_is_that_of_a_graph(count, seed):
    draw = random.Random(seed)
    verdicts = {True: 0, False: 0}
    for _ in range(count):
        order = drawn_order(draw)
        r = draw.randrange(order.coordinates)
        row = list(order.actions[r])
        j, k = draw.randrange(len(row)), draw.randrange(len(row))
        row[j], row[k] = row[k], row[j]
        order = with_row(order, r, row)
        wanted = is_legal(order)
        verdicts[wanted] += 1
        if wanted:
            prove(order)
        else:
            with pytest.raises(BadOrder):
                prove(order)
    assert min(verdicts.values()) > count / 20


def test_coordinates_that_wait_for_each_other_are_told():
    order = Order.of((0, 1, 2), 2, ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F0 2F1 2B0 2B1"))
    with pytest.raises(BadOrder) as caught:
        prove(order)
    first, _, rest = str(caught.value).partition("\n")
    assert first == "coordinate 1 waits at 1B0 for 2B0 of coordinate 2, for ever"
    assert "coordinate 2 waits at 2F1 for 1F1 of coordinate 1" in rest


def test_more_in_flight_than_planned_is_refused():
    order = order_of("1f1b", 4, 8)
    assert prove(order, (4, 3, 2, 1)).in_flight == (4, 3, 2, 1)
    with pytest.raises(BadOrder, match="coordinate 1 holds 3 turns of stages with 1F2"):
        prove(order, (4, 2, 2, 1))


def test_what_sends_that_block_ask_of_receives():
    """By hand: 1F1B on two coordinates, where each sends while the other does."""
    assert prove(order_of("gpipe", 2, 4)).receives_ahead == 0
    assert prove(order_of("1f1b", 2, 4)).receives_ahead == 1
    assert prove(order_of("1f1b", 1, 4)).receives_ahead == 0


def test_values_that_skip_stages_are_messages_too():
    """Stage 2 reads what stage 0 gives: its coordinate gets that before what comes through stage 1."""
    texts = ("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", "2F0 2F1 2B0 2B1")
    borders = [(0, 1), (1, 2), (0, 2)]
    assert prove(Order.of((0, 1, 2), 2, texts), borders=borders).in_flight == (2, 2, 2)
    with pytest.raises(BadOrder, match="coordinate 0 sends 0F0 to coordinate 2, which receives for 2F1 first"):
        prove(Order.of((0, 1, 2), 2, (texts[0], texts[1], "2F1 2F0 2B0 2B1")), borders=[(0, 2)])


def test_stages_have_to_be_on_their_coordinates():
    with pytest.raises(BadOrder, match="coordinate 0 runs 1F0, which is not of its stages and turns"):
        prove(Order.of((0, 1), 1, ("0F0 1F0 0B0", "1B0")))
    with pytest.raises(BadOrder, match="places stages at"):
        prove(Order.of((0, 2), 1, ("0F0 0B0", "1F0 1B0")))

"""The exchange of experts alone, on four processes: any routing, any division of rows, counted from outside."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from autopar.runtime.bodies import HALVES, NotABody, gradients_of_body, read_body, run_body
from autopar.runtime.collectives import Axis
from autopar.runtime.experts import Setup, experts_backward, experts_forward
from autopar.runtime.visits import Hop, Round
from autopar.testing import on_processes

RANKS, EXPERTS, SLOTS, WIDTH, INNER = 4, 8, 3, 6, 5
ROUTINGS = ("random", "one device", "one first", "equal", "near", "none last")
DIVISIONS = ((16, 16, 16, 16), (20, 20, 20, 4), (32, 32, 0, 0))


def gated(rows):
    gate, other = rows.chunk(2, -1)
    return F.silu(gate) * other


def drawn(routing: str, division) -> list[torch.Tensor]:
    """Rows, ids, weights, matrices and the gradient of the result."""
    generator = torch.Generator().manual_seed(ROUTINGS.index(routing))
    rows = sum(division)
    scores = torch.rand(rows, EXPERTS, generator=generator, dtype=torch.float64)
    if routing == "one device":
        scores[:, :SLOTS] += 2
    elif routing == "one first":
        scores[:, 5] += 4
    elif routing == "equal":
        scores[:] = 1.0
    elif routing == "near":
        for device, part in enumerate(scores.split(division)):
            part[:, [(2 * device + i) % EXPERTS for i in range(SLOTS)]] += 2
    elif routing == "none last":
        scores[:, -2:] -= 4
    weights, ids = scores.topk(SLOTS)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return [normal(rows, WIDTH), ids, weights, normal(EXPERTS, 2 * INNER, WIDTH), normal(EXPERTS, WIDTH, INNER),
            normal(rows, WIDTH)]  # fmt: skip


def eager(x, ids, weights, up, down):
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        row, slot = torch.where(ids == e)
        out = out.index_add(0, row, gated(x[row] @ up[e].T) @ down[e].T * weights[row, slot, None])
    return out


class Outside:
    """Counts what `torch.distributed` is given, and the rows of a round."""

    def __init__(self, monkeypatch):
        self.sent, self.rows, self.most = 0, 0, 0
        send, begin = dist.all_to_all_single, Round.__init__

        def counted(made, given, comes, sends, **how):
            self.sent += (sum(sends) - sends[dist.get_rank()]) * given[:1].numel() * given.element_size()
            self.rows = max(self.rows, sum(comes), sum(sends))
            return send(made, given, comes, sends, **how)

        def begun(round, way, i):
            begin(round, way, i)
            self.most = max(self.most, i + 1)

        monkeypatch.setattr(dist, "all_to_all_single", counted)
        monkeypatch.setattr(Round, "__init__", begun)


def on_a_rank(rank: int, routing: str, division, spare: int):
    """Results and gradients of one rank's rows and experts, what it sent in forward, and the largest round."""
    with pytest.MonkeyPatch.context() as patch:
        outside = Outside(patch)
        x, ids, weights, up, down, gradient = drawn(routing, division)
        mine = slice(sum(division[:rank]), sum(division[: rank + 1]))
        own = slice(2 * rank, 2 * rank + 2)
        axis = Axis("tp", RANKS, rank, dist.group.WORLD)
        body = read_body(gated, HALVES).text
        setup = Setup(body, 48 * spare, hops=(Hop("tp", RANKS, EXPERTS, 5 * spare),)).text()
        tensors = [x[mine], ids[mine], weights[mine], up[own], down[own]]
        out, *kept = experts_forward(tensors, [axis], setup)
        sent, rounds = outside.sent, outside.most
        return out, experts_backward(tensors, [axis], kept, gradient[mine], setup), sent, outside.rows, rounds


def all_on_a_rank(rank: int):
    return [on_a_rank(rank, *case) for case in CASES]


CASES = list(itertools.product(ROUTINGS, DIVISIONS, (1, 4)))


@pytest.mark.machines
@pytest.mark.timeout(120)
def test_rows_travel_exactly_in_bounded_rounds():
    by_rank = on_processes(RANKS, all_on_a_rank)
    rounds_seen = set()
    for case, of_ranks in zip(CASES, zip(*by_rank, strict=True), strict=True):
        routing, division, spare = case
        x, ids, weights, up, down, gradient = drawn(routing, division)
        trained = [t.requires_grad_() for t in (x, weights, up, down)]
        expected = eager(x, ids, weights, up, down)
        gradients = torch.autograd.grad(expected, trained, gradient)
        outs, found, sent, rows, rounds = zip(*of_ranks, strict=True)
        torch.testing.assert_close(torch.cat(outs), expected.detach(), rtol=0, atol=1e-11)
        for k, right in enumerate(gradients):
            torch.testing.assert_close(torch.cat([g[k] for g in found]), right, rtol=0, atol=1e-11, msg=str(case))
        owner = torch.arange(RANKS).repeat_interleave(torch.tensor(division))
        goes = torch.zeros(len(ids), RANKS, dtype=torch.bool).scatter_(1, ids // 2, True)
        visits = int(goes.sum() - goes.gather(1, owner[:, None]).sum())  # those that leave their device
        assert sum(sent) == visits * (2 * WIDTH * 8 + SLOTS * (8 + 8)), case  # there with routes, and back
        assert max(rows) <= RANKS * 5 * spare
        rounds_seen |= set(rounds)
        assert len(set(rounds)) == 1  # all ranks take part in all of them
    assert {1, 4} <= rounds_seen


def test_a_body_is_told_by_its_rows():
    found = read_body(gated, HALVES)
    assert found.is_by_rows and found.is_by_columns
    assert not read_body(lambda rows: gated(rows - rows.mean(0)), HALVES).is_by_rows
    normed = read_body(lambda rows: F.softmax(gated(rows), -1), HALVES)
    assert normed.is_by_rows and not normed.is_by_columns
    with pytest.raises(NotABody, match="control flow"):
        read_body(lambda rows: rows if rows.sum() > 0 else -rows, HALVES)
    rows = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)
    gradient = torch.randn(7, 3, dtype=torch.float64)
    (expected,) = torch.autograd.grad(gated(rows), rows, gradient)
    with torch.no_grad():
        torch.testing.assert_close(run_body(found.text)(rows), gated(rows), rtol=0, atol=0)
        (derived,) = gradients_of_body(found.text, rows, (), gradient)
        torch.testing.assert_close(derived, expected, rtol=0, atol=1e-15)

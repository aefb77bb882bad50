"""Writes become values: every case runs eagerly and as a graph, with gradients, buffers, inputs and the generator
compared.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.graph.graph import Graph, op_name
from autopar.letters import NotCaptured
from autopar.tracer import ColoTracer
from autopar.tracer.values import overlaps
from tests.tracer.cases import Of, check, traced


def chain(m, x):
    h = x @ m.weight
    h.add_(1)
    h *= 2
    h = h.tanh_() * 1
    h[:, 1] = 0
    h[0].mul_(3)
    h.view(2, 8)[:, :3] += 1
    return (h**2).sum()


def family(m, x):
    z = torch.zeros(16)
    a = z.view(4, 4)
    b, c = a[1], z[2:6]
    b.copy_((x @ m.weight)[0])
    _ = c.grad_fn  # eager asks for it, or takes c for a leaf
    c += 1
    _ = a.grad_fn
    a.t()[0] = 5.0
    return (a * x).sum() + (b**2).sum() + c.sum() + z.sum()


def pieces(m, x):
    z = torch.zeros_like(x)
    p, q = z.chunk(2, -1)
    p.copy_(x[:, :2])
    q.fill_(2.0)
    rows = list(z.unbind(0))
    rows[1].zero_()
    z.diagonal().add_(3)
    return (z @ m.weight).sum() + p.sum()


def rows_from_rows(m, x):
    z = (x @ m.weight).view(2, 2, 4) + 0
    first = z[0]
    first[..., 1::2] = z[1, ..., 1::2]  # as rotary embeddings of images take frequencies of other grids
    first[..., 0::4] = first[..., 3::4]
    first[:0] = z[1, :0]
    return (first**2).sum() + (z**3).sum()


def slices(m, x):
    z = torch.zeros(4, 4)
    z[1:3, ::2] = (x @ m.weight)[1:3, ::2]
    z[..., 3] = x[0]
    z[None, 0] = 7
    return (z**2).sum()


def by_index(m, x):
    h = x @ m.weight
    h[x > 0] = 0.0
    h.masked_fill_(x < -1, 3.0)
    i = torch.tensor([0, 1])
    h[i] = 1.0
    h[:, i] += 2
    h.index_add_(0, i, x[:2])
    h.scatter_(1, torch.zeros(4, 1, dtype=torch.long), 9.0)
    h.clamp_(-2, 2)
    return (h**2).sum()


def promoted(m, x):
    h = (x @ m.weight).to(torch.bfloat16)
    h.add_(x)
    h *= 2.5
    n = torch.zeros(4, dtype=torch.long)
    n += 2
    n.add_(torch.ones(4, dtype=torch.int32))
    return (h.float() * n).sum()


def options(m, x):
    h = x @ m.weight
    return (
        F.relu(h * 1, True)
        + F.hardswish(h * 1, inplace=True)
        + F.dropout(h * 1, 0.5, True, True)
        + F.leaky_relu(h * 1, 0.1, inplace=True)
    ).sum()


def turned(m, x):
    h = x @ m.weight
    return (h.unsqueeze_(0).squeeze(0).sum() + (x * 1).t_() @ m.weight).sum()


def counters(m, x):
    m.steps += 1
    with torch.no_grad():
        m.mean.mul_(0.9).add_(x.detach(), alpha=0.1)
    return (x @ m.weight + m.mean).sum() * m.steps


def reassigned(m, x):
    m.mean = m.mean * 0.5 + x.detach()
    return (x @ m.weight * m.mean).sum()


def made_while_running(m, x):
    m.made = torch.arange(8.0)
    return (x @ m.weight).sum() * m.made.sum()


def a_view_of_a_buffer(m, x):
    m.mean[1].copy_(x[0].detach())
    return (x @ m.weight * m.mean).sum()


def the_input(m, x):
    x[0].mul_(2)
    return (x @ m.weight).sum()


def out_of_another_dtype(m, x):
    z = torch.zeros(4, 4, dtype=torch.float64)
    v = z[1]
    torch.mul(x.detach(), 2, out=z)
    return (z @ m.weight.double()).sum() + v.sum()


def known_into_buffer(m, x):
    m.mean.copy_(x)
    return x @ m.weight


def one_buffer_into_another(m, x):
    m.mean.copy_(m.table)
    return x @ m.weight


def snapshot_and_change(m, x):
    o = m.mean.clone()
    m.mean.add_(1)
    return o, x @ m.weight


def exponential_average(m, x):
    y = (x @ m.weight) * m.mean
    m.mean = m.mean * 0.9 + x.detach()
    return y


def truths_in_place(m, x):
    y, n = x * 1, torch.arange(16).view(4, 4)
    y.gt_(0.0)
    n.eq_(3)
    return (y + y) @ m.weight + n


def overwritten(m, x):
    h, k = x @ m.weight, m.linear(x)
    h.zero_()
    k[:] = 2.0
    return h, k


def narrow_from_the_end(m, x):
    h = x @ m.weight
    h.narrow(1, -2, 2).mul_(2)
    return h


def copy_of_a_number(m, x):
    z = torch.zeros(4, 4)
    z.copy_(3.5)
    return z + x @ m.weight


def slices_added_to(m, x):
    z = torch.zeros(4, 4)
    z[1:3] += (x @ m.weight)[1:3]
    z[:, 2] *= 2
    return (z**2).sum()


def out_under_autocast(m, x):
    z = torch.zeros(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        torch.mul(x, x, out=z)
        y = x @ m.weight
    return z + y


def beside_empty_ones(m, x):
    y = (x @ m.weight).bfloat16()
    ids = y.argmax(-1)
    return torch.cat([torch.empty(0), y]), torch.cat([y, torch.empty(0), y]), torch.cat([ids, torch.empty(0)])


def arrays_and_lists(m, x):
    y = x @ m.weight
    mask, places = [True, False, True, True], np.arange(8) % 4
    z = y * 1
    z[:, np.array(mask)] = 2.0
    z[mask] *= 3
    return y[np.array([2, 0])], y[..., places], y[mask], y[np.ones((4, 4), dtype=bool)], y[:, mask, None], z


CASES = [
    chain,
    arrays_and_lists,
    out_under_autocast,
    beside_empty_ones,
    family,
    pieces,
    rows_from_rows,
    slices,
    by_index,
    promoted,
    options,
    turned,
    counters,
    reassigned,
    made_while_running,
    a_view_of_a_buffer,
    the_input,
    out_of_another_dtype,
    known_into_buffer,
    one_buffer_into_another,
    snapshot_and_change,
    exponential_average,
    truths_in_place,
    overwritten,
    narrow_from_the_end,
    copy_of_a_number,
    slices_added_to,
]


@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_a_write_is_a_value(function):
    graph = check(function)
    assert str(Graph.from_json(graph.to_json())) == str(graph)


def test_what_changes_is_an_output():
    assert traced(counters).updates == (("buffer", "steps"), ("buffer", "mean"))
    assert traced(reassigned).updates == (("buffer", "mean"),)
    assert traced(a_view_of_a_buffer).updates == (("buffer", "mean"),)
    assert traced(the_input).updates == (("input", "x"),)
    assert str(traced(counters)).splitlines()[-3:-1] == ["buffer steps = identity_1", "buffer mean = identity_2"]


def test_basic_assignment_is_a_scatter():
    def shift(m, x):
        z = torch.zeros_like(x)
        z[:, 1:] = (x @ m.weight)[:, :-1]
        z[:, 0] = 1.0
        return z.sum()

    ops = [op_name(n) for n in check(shift).nodes]
    assert "slice_scatter" in ops and "select_scatter" in ops and "setitem" not in ops


def test_running_statistics_are_outputs_and_the_graph_itself_writes_nothing():
    """torch's schema of batch_norm does not say that it writes, so the dispatcher cannot be asked."""
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU())
    x = torch.randn(2, 3, 4, 4)
    graph = ColoTracer().trace(model, (x,))
    assert [n for _, n in graph.updates] == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    before = {n: b.clone() for n, b in model.named_buffers()}
    graph.module(model)._run({"input": x})
    for n, b in model.named_buffers():
        assert torch.equal(b, before[n])
    assert not ColoTracer().trace(model.eval(), (x,)).updates


def test_an_output_nobody_reads_still_updates_its_statistics():
    class Aside(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)

        def forward(self, x):
            y = self.conv(x)
            self.norm(y)
            return y

    model, x = Aside(), torch.randn(2, 3, 4, 4)
    graph = ColoTracer().trace(model, (x,))
    graph.module(model)(x)
    replayed = model.norm.running_mean.clone()
    model.norm.reset_running_stats()
    model(x)
    torch.testing.assert_close(replayed, model.norm.running_mean)


def swap(m, x):
    m.mean, m.table = m.table, m.mean
    return x @ m.weight * m.mean


def test_buffers_may_be_swapped():
    model, x = Of(swap), torch.randn(4, 4)
    a, b = model.mean.clone(), model.table.clone()
    ColoTracer().trace(model, (x,)).module(model)(x)
    assert torch.equal(model.mean, b)
    assert torch.equal(a, torch.zeros(4, 4))


def test_a_snapshot_of_a_parameter_is_not_the_parameter():
    model, x = Of(lambda m, x: (m.weight.clone(), x.clone(), x @ m.weight)), torch.randn(4, 4)
    weight, given, _ = ColoTracer().trace(model, (x,)).module(model)(x)
    assert (
        weight is not model.weight and weight.data_ptr() != model.weight.data_ptr() and given.data_ptr() != x.data_ptr()
    )


def under_no_grad(m, x):
    h = x @ m.weight
    with torch.no_grad():
        h.mul_(2)
    return h.sum()


def through_data(m, x):
    h = x @ m.weight
    h.data.mul_(2)
    return h.sum()


def to_a_parameter(m, x):
    with torch.no_grad():
        m.weight.clamp_(-1, 1)
    return (x @ m.weight).sum()


def through_an_expansion(m, x):
    z = torch.zeros(1, 4).expand(1, 4)
    z.add_(x[:1])
    return z.sum() + m.weight.sum()


def turned_with_views(m, x):
    h = x * 1
    v = h[0]
    h.t_()
    return (h @ m.weight).sum() + v.sum()


def into_out(m, x):
    values, indices = torch.empty(4), torch.empty(4, dtype=torch.long)
    torch.max(x, 1, out=(values, indices))
    return (values @ m.weight).sum()


def resized(m, x):
    return torch.empty(2).resize_(3).sum() + m.weight.sum()


def by_strides(m, x):
    return (x @ m.weight).as_strided((2, 2), (1, 2)).sum()


@pytest.mark.parametrize(
    "function, match",
    [
        (under_no_grad, "under no_grad to a value that carries a gradient"),
        (through_data, "through a detached view"),
        (to_a_parameter, "writes to the parameter weight"),
        (through_an_expansion, "view by expand"),
        (turned_with_views, "others are views of"),
        (into_out, "out="),
        (resized, "another shape or storage"),
        (by_strides, "memory layout"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_a_write_that_cannot_be_a_value_is_a_letter(function, match):
    with pytest.raises(NotCaptured, match=match) as letter:
        traced(function)
    assert f"in {function.__name__}" in letter.value.at and letter.value.at.startswith("test_values.py:")


@pytest.mark.parametrize(
    "function, advice",
    [
        (lambda x: F.one_hot((x > 0).long()), "num_classes"),
        (lambda x: torch.tensor_split(x, torch.tensor([1, 2])), "list of numbers"),
        (lambda x: x.repeat_interleave((x > 0).long()[:, 0], 0), "output_size"),
        (lambda x: x[x > 0], r"torch\.where"),
    ],
)
def test_a_shape_that_values_say_is_a_letter_that_names_another_call(function, advice):
    with pytest.raises(NotCaptured, match=rf"(?s)shape of .* depends on the values.*try .*{advice}"):
        traced(lambda m, x: function(x @ m.weight))


def put(x, mask, values):
    made = x.clone()
    made[mask] = values
    return made


@pytest.mark.parametrize("write", [put, lambda x, mask, values: x.index_put((mask,), values)])
def test_trained_values_under_a_mask_are_a_letter(write):
    """Their gradient is that of the places where the mask is true, as many as there are."""
    with pytest.raises(NotCaptured, match=r"(?s)only the mask says.*masked_scatter"):
        traced(lambda m, x: write(x, x[:, 0] > 0, m.weight[:3] * 1))
    traced(lambda m, x: x.masked_scatter(x[:, :1] > 0, m.weight[:3] * 1))


def test_a_mask_of_another_shape_is_the_models_error():
    with pytest.raises(NotCaptured, match=r"shape of the mask \(3,\) does not match that of the indexed dims \(4,\)"):
        traced(lambda m, x: (x @ m.weight)[[True, False, True]])


def test_views_share_what_their_places_share():
    """Drawn views of 24 elements, by the sets of places that they show."""
    draws = np.random.default_rng(0)
    memory = torch.arange(24)
    told = apart = 0
    for _ in range(2000):
        views = []
        while len(views) < 2:
            shape, steps = draws.integers(0, 4, 2), draws.integers(0, 7, 2)
            offset = int(draws.integers(0, 8))
            if offset + int((np.maximum(shape - 1, 0) * steps).sum()) < 24:
                views.append(memory.as_strided(tuple(map(int, shape)), tuple(map(int, steps)), offset))
        one, other = ({int(k) for k in view.flatten()} for view in views)
        may_meet = overlaps(*views)
        is_same = (views[0].shape, views[0].stride(), views[0].storage_offset()) == (
            views[1].shape,
            views[1].stride(),
            views[1].storage_offset(),
        )
        assert may_meet or is_same or not one & other
        apart += not one & other
        told += not one & other and not may_meet
    assert told > 0.7 * apart > 0

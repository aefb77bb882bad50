"""Attention by parts as it runs on a GPU: the arguments of its calls, against what torch says of the kernels.

No GPU is needed: torch's fused ops are computed here as their documentation says, row by row in float64.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from autopar.runtime import attention
from autopar.runtime.attention import attention_backward, attention_forward
from autopar.runtime.dealing import HALVES, WORK, Cutting, Setup, deal_of, owners_of
from autopar.runtime.sees import Places, Sees
from autopar.runtime.segments import window_of
from tests.attended import drawn, eager

ATEN = torch.ops.aten


class Fused:
    """Torch's flash ops for one device, as they are documented; `calls` has how often each ran."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}

    def _segments(self, query, key, ends):
        """Queries and keys of each segment, as [heads, rows, width], and where they lie."""
        assert query.dim() == key.dim() == (4 if ends[0] is None else 3)
        if ends[0] is None:
            assert ends[2:] == (query.shape[1], key.shape[1])
            return [((b,), (b,)) for b in range(query.shape[0])]
        of_queries, of_keys, *most = ends
        assert of_queries.dtype == of_keys.dtype == torch.int32
        assert [int(of.diff().max()) for of in (of_queries, of_keys)] == most
        assert (int(of_queries[-1]), int(of_keys[-1])) == (len(query), len(key))
        ranges = [[slice(a, z) for a, z in np.lib.stride_tricks.sliding_window_view(of.numpy(), 2)] for of in ends[:2]]
        return [((q,), (k,)) for q, k in zip(*ranges, strict=True)]

    def _scores(self, query, key, window, scale):
        """Scores of [rows, heads, width]; a window is counted from the last query's place at the last key."""
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * scale
        offset = len(key) - len(query)
        i, j = torch.arange(len(query))[:, None] + offset, torch.arange(len(key))
        left, right = (math.inf if end < 0 else end for end in window)
        return scores.masked_fill((j < i - left) | (j > i + right), -math.inf)

    def forward(self, query, key, value, *ends, dropout=0.0, causal=False, debug=False, scale=None, **window):
        sides = window.pop("window_size_left"), window.pop("window_size_right")
        name = "dense" if ends[0] is None else "segments"
        self.calls[name] = self.calls.get(name, 0) + 1
        out = query.new_zeros(*query.shape[:-1], value.shape[-1])
        sums = query.new_zeros(query.shape[-2], len(query)) if query.dim() == 3 else query.new_zeros(
            query.shape[0], query.shape[2], query.shape[1]
        )  # fmt: skip
        for (q,), (k,) in self._segments(query, key, ends):
            scores = self._scores(query[q], key[k], sides, scale)
            log_sum = scores.logsumexp(-1)
            assert log_sum.isfinite().all()  # a kernel gives rows that see nothing the other infinity
            values = value[k].repeat_interleave(query.shape[-2] // key.shape[-2], 1)
            out[q] = torch.einsum("hqk,khd->qhd", (scores - log_sum[..., None]).exp(), values)
            sums[(slice(None), q) if query.dim() == 3 else q] = log_sum
        return out, sums

    def backward(self, gradient, query, key, value, out, sums, *ends, scale=None, **window):
        sides = window.pop("window_size_left"), window.pop("window_size_right")
        found = [torch.zeros_like(x) for x in (query, key, value)]
        groups = key.shape[-2]
        assert sums.is_contiguous()
        for (q,), (k,) in self._segments(query, key, ends):
            log_sum = sums[:, q] if query.dim() == 3 else sums[q]
            weights = (self._scores(query[q], key[k], sides, scale) - log_sum[..., None]).exp()
            keys, values = (x[k].repeat_interleave(query.shape[-2] // groups, 1) for x in (key, value))
            dots = (gradient[q] * out[q]).sum(-1).t()[..., None]
            of_scores = weights * (torch.einsum("qhd,khd->hqk", gradient[q], values) - dots) * scale
            found[0][q] = torch.einsum("hqk,khd->qhd", of_scores, keys)
            for x, made in ((1, torch.einsum("hqk,qhd->khd", of_scores, query[q])),
                            (2, torch.einsum("hqk,qhd->khd", weights, gradient[q]))):  # fmt: skip
                found[x][k] = made.unflatten(1, (groups, -1)).sum(2)
        return found


@pytest.fixture
def fused(monkeypatch):
    """Kernels of a GPU on the CPU."""
    found = Fused()
    monkeypatch.setattr(attention, "attention_kernel", lambda *_: "flash")
    library = torch.library.Library("aten", "IMPL")

    def forward(query, key, value, of_queries, of_keys, most_queries, most_keys, dropout, causal, debug, **how):
        assert not (dropout or causal or debug)
        made = found.forward(query, key, value, of_queries, of_keys, most_queries, most_keys, **how)
        return *made, *(query.new_empty(0) for _ in range(3))

    def backward(g, query, key, value, out, sums, of_q, of_k, most_q, most_k, dropout, causal, seed, offset, **how):
        assert not (dropout or causal)
        return found.backward(g, query, key, value, out, sums, of_q, of_k, most_q, most_k, **how)

    def plain(query, key, value, dropout=0.0, causal=False, debug=False, *, scale=None):
        assert not causal or query.shape[2] == key.shape[2]
        rows = [x.transpose(1, 2) for x in (query, key, value)]
        window = dict(window_size_left=-1, window_size_right=0 if causal else -1)
        out, sums = found.forward(*rows, None, None, query.shape[2], key.shape[2], scale=scale, **window)
        return out.transpose(1, 2), sums, None, None, 0, 0, *(query.new_empty(0) for _ in range(3))

    def plain_back(g, query, key, value, out, sums, _q, _k, most_q, most_k, dropout, causal, seed, offset, *, scale):
        rows = [x.transpose(1, 2) for x in (g, query, key, value, out)]
        window = dict(window_size_left=-1, window_size_right=0 if causal else -1)
        made = found.backward(*rows, sums, None, None, most_q, most_k, scale=scale, **window)
        return [x.transpose(1, 2) for x in made]

    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    library.impl("_scaled_dot_product_flash_attention", plain, "CPU")
    library.impl("_scaled_dot_product_flash_attention_backward", plain_back, "CPU")
    yield found
    library._destroy()


ROWS = 121
MASKS = {  # what queries see, whether there are documents, counts and sinks, how rows are dealt, calls of segments
    "causal": (Sees(right=0), (False, False, False), HALVES),
    "full": (Sees(), (False, False, False), ""),
    "window": (Sees(19, 0), (False, False, False), ""),
    "both ways": (Sees(9, 12), (False, False, False), ""),
    "chunks": (Sees(right=0, chunk=48), (False, False, False), WORK),
    "documents": (Sees(right=0), (True, False, False), WORK),
    "documents, window": (Sees(15, 0), (True, False, False), WORK),
    "padded, sinks": (Sees(right=0), (False, True, True), WORK),
}


def ran(setup: Setup, tensors, gradient):
    """The result and all gradients of the rows that one device computes, on whole keys."""
    given = [x for x in tensors if x is not None]
    made = attention_forward(given, (), setup.text())
    return made[0], *attention_backward(given, (), made, gradient, setup.text())


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("name", MASKS)
def test_calls_of_segments_equal_eager(name, parts, fused):
    """Queries of each of three devices, dealt and as they lie; gradients of keys are summed over devices."""
    sees, has, dealt = MASKS[name]
    *tensors, gradient = drawn(ROWS, has)
    trained = [x.requires_grad_() for x in tensors if x is not None and x.is_floating_point()]
    out = eager(*tensors, sees)
    right = torch.autograd.grad(out, trained, gradient)
    tensors = [x if x is None else x.detach() for x in tensors]
    for way in {"", dealt} if parts > 1 else {""}:
        sums = [torch.zeros_like(x) for x in right]
        for place in range(parts):
            cuts = (Cutting("a", parts, place),) if parts > 1 else ()
            setup = Setup(sees.text(), ROWS, ROWS, cuts, (), way, has)
            places = Places.of(sees, (ROWS, ROWS), *tensors[3:5])
            owners = owners_of(setup, lambda places=places: places) if way else None
            own = torch.from_numpy(deal_of(setup.text(), owners, False).here)
            found, *gradients = ran(setup, [tensors[0][:, :, own], *tensors[1:]], gradient[:, :, own])
            torch.testing.assert_close(found, out[:, :, own].detach(), rtol=0, atol=1e-12)
            sums[0][:, :, own] += gradients[0]
            for total, x in zip(sums[1:], gradients[1:], strict=True):
                total += x
        for total, x in zip(sums, right, strict=True):
            torch.testing.assert_close(total, x, rtol=0, atol=1e-12)


COUNTED = {  # calls in forward, of one device
    "causal": {"dense": 1},
    "window": {"dense": 1},
    "documents": {"segments": 1},
    "documents, window": {"segments": 1},
    "chunks": {"segments": 1},
}


@pytest.mark.parametrize("name", COUNTED)
def test_one_call_has_all_documents(name, fused):
    sees, has, _ = MASKS[name]
    *tensors, _ = drawn(ROWS, has)
    attention_forward([x for x in tensors if x is not None], (), Setup(sees.text(), ROWS, ROWS, given=has).text())
    assert fused.calls == COUNTED[name]


@pytest.mark.parametrize("wrong", ["window", "lengths"])
def test_wrong_arguments_are_noticed(wrong, fused, monkeypatch):
    if wrong == "window":  # counted from the first query
        monkeypatch.setattr(attention, "window_of", lambda tile: window_of(tile._replace(keys=tile.queries)))
    else:
        lengths = attention.Segments.lengths
        monkeypatch.setattr(
            attention.Segments, "lengths", lambda *given: (of := lengths(*given), of.keys[1].sub_(1))[0]
        )
    with pytest.raises(AssertionError):
        test_calls_of_segments_equal_eager("both ways" if wrong == "window" else "documents", 3, fused)

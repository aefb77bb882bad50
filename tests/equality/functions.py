"""Functions of a model and its input, as models write them, whose plans are held against eager."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def no_grad_part(m, x):
    with torch.no_grad():
        target = (x @ m.weight).tanh()
    return ((x @ m.weight) - target).pow(2).sum() + m.weight.sum()


def blind_attention(m, x):
    q = (x @ m.weight).view(1, 1, 6, 6)
    mask = F.pad(q.detach() * 0 + 1, (0, 0, 0, 0)) > 0
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask & (q.detach().sum(-1, keepdim=True) > -1e9)).sum()


def writes(m, x):
    h = x @ m.weight
    h.add_(1)
    h[:, 1:] = h[:, :-1] * 1
    h[x > 0] = 0.5
    m.mean.add_(h.detach().sum(0))
    return (h.relu_() * m.mean).sum()


def through_views(m, x):
    z = torch.zeros_like(x)
    a, b = z.view(3, 12), z.t()
    a[1].copy_((x @ m.weight).view(-1)[:12])
    return (z * x).sum() + (b @ m.weight).sum()


class WritesBackward(torch.autograd.Function):
    """Its backward writes to a part of what it was given."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        g[::2] = 0
        g[1].mul_(3)
        return g


def writes_modes(m, x):
    """As spectral convolutions do: the low modes are mixed, the others stay zero."""
    modes = torch.fft.rfft(x @ m.weight)
    mixed = torch.zeros_like(modes)
    mixed[..., :3] = modes[..., :3] * torch.view_as_complex(m.weight.view(6, 3, 2))
    mixed[:, 3] = modes[:, 1].conj()
    mixed[2:4].mul_(modes[0])
    mixed.t()[0].add_(modes.mean(1))
    return torch.fft.irfft(mixed, n=6).pow(3).sum()


def writes_every_other(m, x):
    y = (x @ m.weight).clone()
    y[1:5:2] = x[:2]
    y[::2].mul_(0.5)
    y[torch.tensor(3)] = x[1]
    y[1:3, torch.tensor([1, 2])] = 0
    return y.pow(2).sum()


def writes_where(m, x):
    y = (x @ m.weight).clone()
    y[x > 0] = m.weight[0, 0]
    y[torch.tensor([True, False, True, False, False, True])] = m.weight[0]
    y[x < -1] = torch.tensor(3.0).double()
    return y.pow(2).sum()


def overwrites(m, x):
    y = (x @ m.weight).clone()
    y.copy_((x * 3).long())
    return (y * x).sum() + 0 * m.weight.sum()


class Scale(torch.autograd.Function):
    """Its backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 3


def writes_behind_a_range(m, x):
    h = (x @ m.weight)[:4] * 1
    h[1:, x[0] > 0] = 0.5
    return (h * x[:4]).sum()


def rows_of_numbers(m, x):
    """Tensors of one number choose a row, look at it, and are written through; numbers choose before tensors."""
    y = (x @ m.weight).view(2, 3, 6)
    one, places = torch.arange(2)[-1], torch.tensor([2, 0, 1, 2, 5, 3])
    z = y * 1
    z[one].mul_(0.5)
    z[:, one] = y[:, 0] * 2
    z[0, one, 1:3] += 1
    z[1, :, places[:3]] = y[0, :, 3:] * 3
    return (
        (y[one, :, places] * y[0, :, places]).sum()
        + y[y.detach().sum((1, 2)).argmax()].pow(2).sum()
        + y[..., one, places].sum()
        + z.pow(3).sum()
    )


def copies_rows(m, x):
    """Rows that only values tell apart are written to each other, and stay where they were chosen."""
    y = (x @ m.weight) * 1
    two, three = torch.arange(3)[-1], torch.arange(4)[-1]
    y[two] = y[three]
    y[two, three] = y[three, two]
    kept = y[two]
    y[0] = 7
    y[three] = kept
    place = two * 1
    row = y[place]
    place.add_(2)
    row.add_(3)
    y[place] = y[0]
    return (y * torch.arange(36).view(6, 6)).pow(2).sum()


FUNCTIONS = {
    "a pad that shifts": lambda m, x: (
        (F.pad(x @ m.weight, (1, -1)) * x).sum() + (F.pad(x @ m.weight, (0, 0, 1, -1)) * x).sum()
    ),
    "a sum of truth values": lambda m, x: (((x > 0) + (x > 1) + (x > 0)).to(torch.float64) * (x @ m.weight)).sum(),
    "frequencies scale a gradient": lambda m, x: (
        F.embedding((x.abs() * 2).long().clamp(max=5), m.weight, scale_grad_by_freq=True) ** 2
    ).sum(),
    "the padding row counts from the end": lambda m, x: (
        F.embedding((x.abs() * 2).long().clamp(max=5), m.weight, padding_idx=-1) ** 2
    ).sum(),
    "a part without gradients": no_grad_part,
    "x.T": lambda m, x: (x @ m.weight.T).tanh().sum() + x.mT.sum() * m.weight.data.sum() + m.weight.sum(),
    "turned, then viewed": lambda m, x: (x @ m.weight).view(6, 2, 3).permute(1, 0, 2).reshape(12, 3).tanh().sum(),
    "softmax without a dim": lambda m, x: (F.softmax(x @ m.weight) * x).sum(),
    "a vector": lambda m, x: (x @ m.weight[0]).tanh().sum(),
    "sums over no dims are sums over all": lambda m, x: (x @ m.weight).mean(dim=()) + (x * m.weight).sum(dim=[]),
    "an empty part": lambda m, x: (x @ m.weight).split([0, 6], 1)[1].sum(),
    "masked attention": blind_attention,
    "convolutions": lambda m, x: (
        F.conv1d(
            F.conv1d((x @ m.weight).view(2, 6, 3), m.weight[:, :, None], m.mean + 1).relu(),
            m.weight[:, :3, None],
            groups=2,
        )
        .tanh()
        .sum()
    ),
    "norms of groups": lambda m, x: (
        F.group_norm((x @ m.weight).view(2, 6, 3), 2, m.weight[0], m.weight[1]) * F.instance_norm((x * 2).view(2, 6, 3))
    ).sum(),
    "pools": lambda m, x: (
        F.max_pool1d((x @ m.weight).view(2, 6, 3), 2)
        + F.avg_pool1d((x @ m.weight).view(2, 6, 3), 2)
        + F.interpolate((x @ m.weight).view(2, 6, 3), 2)
    ).sum(),
    "einsum": lambda m, x: (
        torch.einsum("ab,cb->ac", x @ m.weight, m.weight).tanh().sum() + torch.addmm(m.weight[0], x, m.weight).sum()
    ),
    "looked up": lambda m, x: (
        (x @ m.weight)[torch.tensor([0, 2, 2])]
        + (x @ m.weight).gather(0, torch.tensor([[0] * 6, [1] * 6, [0] * 6]))
        + (x @ m.weight)[:, [1, 1]].sum()
    ).sum(),
    "scattered": lambda m, x: (
        torch.zeros(6, 6).double().scatter_add(1, torch.tensor([[0, 1, 1, 0, 2, 2]] * 6), x @ m.weight) * x
    ).sum(),
    "along a dim": lambda m, x: (
        (x @ m.weight).cumsum(1) * F.log_softmax(x @ m.weight, 0)
        + (x @ m.weight).logsumexp(1, keepdim=True)
        + (x @ m.weight).roll(1, 0)
        + (x @ m.weight).sort(1)[0].flip(0)
    ).sum(),
    "made": lambda m, x: (
        (x @ m.weight) * torch.full((6, 6), 2.0).double()
        + torch.ones(1, 6).double().expand(6, 6) * m.weight
        + torch.arange(6)
        + torch.zeros_like(x)
        + x.new_ones(6)
    ).sum(),
    "stacked": lambda m, x: (
        (torch.stack([x @ m.weight, x]).unbind(1)[2] * 2).sum()
        + (x @ m.weight).repeat(2, 1).tril().sum()
        + torch.where(x > 0, x @ m.weight, 0.0).masked_fill(x > 1, 0.0).sum()
    ),
    "discovered": lambda m, x: (
        (torch.sinc(x @ m.weight) * x.std(0)).sum()
        + torch.kron(x @ m.weight, x[:2, :2]).tanh().sum()
        + (x @ m.weight).unfold(1, 3, 1).exp().sum()
        + torch.cdist(x @ m.weight, x).sum()
    ),
    "losses": lambda m, x: (
        F.binary_cross_entropy_with_logits(x @ m.weight, x.sigmoid(), pos_weight=m.mean + 2)
        + F.l1_loss(x @ m.weight, x)
        + F.smooth_l1_loss(x @ m.weight, x)
        + F.nll_loss(F.log_softmax(x @ m.weight, 1), torch.tensor([0, 1, 2, -100, 4, 5]))
        + F.kl_div((x @ m.weight).log_softmax(1), x.softmax(1), reduction="batchmean")
        + F.cross_entropy(x @ m.weight, torch.tensor([0, 1, -100, 3, 4, 5]), weight=m.mean + 1.5, label_smoothing=0.1)
    ),
    "writes in place": writes,
    "a write through views": through_views,
    "writes to every other row": writes_every_other,
    "writes where it is true": writes_where,
    "a backward that writes": lambda m, x: (WritesBackward.apply(x @ m.weight) * x).sum(),
    "writes where it is true behind a range": writes_behind_a_range,
    "rows of numbers": rows_of_numbers,
    "rows are copied": copies_rows,
    "overwritten": overwrites,
    "the largest of nothing": lambda m, x: (
        (x @ m.weight).masked_fill(torch.arange(36).view(6, 6) // 6 == 1, -torch.inf).amax(1).clamp(min=-9).pow(2).sum()
        + (x @ m.weight).sum()
    ),
    "the largest of whole numbers": lambda m, x: (
        ((x * 5).long().amax(-1) + (x.abs() * 5).to(torch.uint8).amin(0)).sum() * (x @ m.weight).sum()
    ),
    "a count of whole numbers from a fraction": lambda m, x: (
        (torch.arange(-2.5, 3.5, 1, dtype=torch.int32) + (x @ m.weight)).pow(2).sum()
    ),
    "without dims": lambda m, x: (
        (x @ m.weight).sum().sum().view(1).unsqueeze(0).expand(3, 1, 1).sum()
        + (x @ m.weight).sum().amax()
        + (x @ m.weight).sum().softmax(0)
        + F.cross_entropy((x @ m.weight)[0], torch.tensor(2))
    ),
    "its own backward": lambda m, x: Scale.apply(x @ m.weight).sum(),
    "running statistics": lambda m, x: (F.batch_norm(x @ m.weight, m.mean, m.var, training=True) * x).sum(),
    "statistics of pictures": lambda m, x: (
        F.batch_norm((x @ m.weight).view(2, 6, 3), m.mean, m.var, m.weight[0], m.weight[1], training=True).pow(3)
        * x.view(2, 6, 3)
    ).sum(),
    "statistics that nobody keeps": lambda m, x: (
        F.batch_norm((x @ m.weight).view(6, 2, 3), None, None, training=True).pow(3) * x.view(6, 2, 3)
    ).sum(),
    "a checkpoint": lambda m, x: torch.utils.checkpoint.checkpoint(
        lambda y: (y @ m.weight).tanh(), x @ m.weight, use_reentrant=False
    ).sum(),
    "parts of complex numbers": lambda m, x: (
        (torch.fft.rfft(x @ m.weight)[1:5, :3] * torch.view_as_complex((x @ m.weight).view(6, 3, 2))[2])
        .abs()
        .pow(3)
        .sum()
    ),
    "ranges of complex numbers are written": writes_modes,
    "vmap of complex numbers": lambda m, x: torch.vmap(lambda r: torch.fft.rfft(r).abs().pow(3).sum())(
        x @ m.weight
    ).sum(),
    "vmap": lambda m, x: torch.vmap(lambda r: r.sin() * r.sum())(x @ m.weight).sum(),
}

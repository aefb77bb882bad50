"""Calls of every op of the vocabulary, with shapes that tell dims apart and values that catch what is only nearly
right.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from autopar.ops.entry import FACTS, OPS
from autopar.runtime.bodies import HALVES, ONE, PAIRS, read_body

RANDOM = torch.Generator().manual_seed(2)  # samples are the same in every run


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True, generator=RANDOM)


def positive(*shape):
    return (torch.rand(*shape, dtype=torch.float64, generator=RANDOM) + 0.5).requires_grad_()


def waves(*shape):
    return torch.randn(*shape, dtype=torch.complex128, requires_grad=True, generator=RANDOM)


SAMPLES = {
    "linear": [
        dict(input=normal(5, 7, 4), weight=normal(6, 4), bias=normal(6)),
        dict(input=normal(5, 4), weight=normal(6, 4)),
    ],
    "mm": [dict(input=normal(5, 4), mat2=normal(4, 7))],
    "add": [
        dict(input=normal(5, 4), other=normal(5, 4)),
        dict(input=normal(5, 4), other=normal(4), alpha=0.5),
        dict(input=normal(5, 4), other=2.0),
        dict(input=normal(5, 1), other=normal(5, 4)),
    ],
    "mul": [dict(input=normal(5, 4), other=normal(5, 1)), dict(input=normal(5, 4), other=2.0)],
    "div": [
        dict(input=normal(5, 4), other=positive(4)),
        dict(input=normal(5, 4), other=positive(4), rounding_mode="floor"),
    ],
    "pow": [dict(input=positive(5, 4), exponent=2), dict(input=positive(5, 4), exponent=positive(5, 4))],
    "to": [dict(input=normal(5, 4), dtype=torch.float32), dict(input=normal(5, 4), dtype=torch.int64)],
    "sum": [
        dict(input=normal(5, 4)),
        dict(input=normal(5, 4, 3), dim=1),
        dict(input=normal(5, 4, 3), dim=(0, -1), keepdim=True),
    ],
    "layer_norm": [
        dict(input=normal(5, 4, 6), normalized_shape=(6,), weight=normal(6), bias=normal(6)),
        dict(input=normal(5, 4, 6), normalized_shape=(4, 6)),
    ],
    "mse_loss": [dict(input=normal(5, 4), target=normal(5, 4), reduction="none")],
    **{op: [dict(input=positive(5, 4))] for op in ("log", "sqrt", "rsqrt")},
}
SAMPLES["sub"] = SAMPLES["add"]


def whole_numbers(high, *shape):
    return torch.randint(0, high, shape, generator=RANDOM)


def ignoring(targets, *rows):
    targets[list(rows)] = -100
    return targets


def described(sees, heads=4, rows=12, documents=False, sinks=False, counts=False):
    """A call of an attention with a description."""
    given = dict(query=normal(2, heads, rows, 4), key=normal(2, 2, rows, 4), value=normal(2, 2, rows, 3), sees=sees)
    if documents:
        given["documents"] = (torch.arange(rows) >= torch.tensor([[5], [7]])).long()
    if counts:
        given["counts"] = (torch.arange(rows) < rows - 3).long()[None]
    return {**given, **(dict(sinks=normal(heads)) if sinks else {})}


def experts(layout, biases=False, **how):
    """A call of four experts, two for a row, one of which is missing now and then."""
    inner, width = 6, 6 if layout == ONE else 12
    up, down = (4, width, 3), (4, 3, inner)
    if how.get("transposed"):
        up, down = (4, 3, width), (4, inner, 3)

    def body(rows):
        gate, other = (rows[:, ::2], rows[:, 1::2]) if layout == PAIRS else rows.chunk(2, -1)
        return F.silu(gate) * other

    ids = torch.rand(8, 4, generator=RANDOM).topk(2).indices
    ids[3, 1] = -1
    more = dict(up_bias=normal(4, width), down_bias=normal(4, 3)) if biases else {}
    text = read_body(F.gelu if layout == ONE else body, layout).text
    given = dict(input=normal(8, 3), ids=ids, weights=positive(8, 2), up=normal(*up), down=normal(*down))
    return {**given, **more, "body": text, "layout": layout, **how}


SAMPLES |= {
    "experts": [experts(HALVES), experts(PAIRS, biases=True, transposed=True), experts(ONE, biases=True)],
    "matmul": [dict(input=normal(5, 4), other=normal(4, 7)), dict(input=normal(3, 1, 5, 4), other=normal(6, 4, 7))],
    "eq": [dict(input=whole_numbers(3, 5, 4), other=whole_numbers(3, 4)), dict(input=whole_numbers(3, 5, 4), other=1)],
    "dropout": [dict(input=normal(5, 4), p=0.0)],
    "softmax": [dict(input=normal(5, 4, 6), dim=1)],
    "rms_norm": [dict(input=normal(5, 4, 6), normalized_shape=(6,), weight=normal(6))],
    "embedding": [
        dict(input=whole_numbers(6, 5, 4), weight=normal(6, 8)),
        dict(input=whole_numbers(6, 5), weight=normal(6, 8), padding_idx=2),
        dict(input=torch.tensor([1, 1, 1, 2, 2, 0]), weight=normal(6, 8), scale_grad_by_freq=True),
    ],
    "cross_entropy": [
        dict(input=normal(6, 7), target=ignoring(whole_numbers(7, 6), 0, 1, 2), reduction="sum"),
        dict(input=normal(6, 7, 3), target=whole_numbers(7, 6, 3), reduction="sum"),
        dict(
            input=normal(6, 7),
            target=whole_numbers(7, 6),
            weight=positive(7).detach(),
            reduction="sum",
            label_smoothing=0.1,
        ),
    ],
    "scaled_dot_product_attention": [
        dict(query=normal(2, 6, 5, 4), key=normal(2, 6, 7, 4), value=normal(2, 6, 7, 3)),
        dict(query=normal(2, 6, 5, 4), key=normal(2, 6, 5, 4), value=normal(2, 6, 5, 4), is_causal=True),
        dict(
            query=normal(2, 6, 5, 4),
            key=normal(2, 6, 5, 4),
            value=normal(2, 6, 5, 4),
            attn_mask=normal(2, 1, 5, 5).detach(),
        ),
        dict(query=normal(2, 12, 5, 4), key=normal(2, 6, 5, 4), value=normal(2, 6, 5, 4), enable_gqa=True),
        *(
            dict(
                query=normal(2, 12, 5, 4),
                key=normal(2, 6, 5, 4),
                value=normal(2, 6, 5, 4),
                attn_mask=normal(*mask),
                enable_gqa=True,
            )
            for mask in ((5, 5), (1, 5, 5), (12, 5, 5), (2, 12, 5, 5))
        ),
    ],
    "view": [dict(input=normal(6, 4), size=s) for s in ((24,), (6, 2, 2), (6, 1, 4), (1, 6, 4), (3, 8), (4, 6))]
    + [dict(input=normal(6, 2, 12), size=s) for s in ((12, 12), (6, 24), (6, 2, 6, 2), (3, 2, 24))],
    "transpose": [dict(input=normal(5, 4, 6), dim0=-1, dim1=0)],
    "permute": [dict(input=normal(5, 4, 6), dims=(2, 0, 1))],
    "split": [dict(input=normal(5, 12), sections=(6, 6), dim=1), dict(input=normal(5, 24), sections=(12, 6, 6), dim=1)],
    "cat": [dict(tensors=[normal(5, 6), normal(5, 12)], dim=1)],
    "narrow": [dict(input=normal(5, 4), dim=1, start=1, length=2), dict(input=normal(4, 4), dim=0, start=0, length=4)],
    "select": [dict(input=normal(5, 4, 6), dim=1, index=2)],
    "pad": [dict(input=normal(5, 4), pad=(0, 1)), dict(input=normal(5, 4), pad=(1, 0), value=3.0)],
}
SAMPLES["ne"] = SAMPLES["eq"]


SMOOTH = (
    "gelu silu tanh sigmoid exp cos sin tan square erf erfc expm1 exp2 atan cosh sinh hardswish mish selu logsigmoid "
    "softsign elu celu softplus nan_to_num relu6 hardsigmoid hardtanh leaky_relu"
).split()
FLOAT_PAIRS = "maximum minimum atan2 logaddexp fmod remainder".split()
WHOLE_PAIRS = "lt le gt ge bitwise_and bitwise_or bitwise_xor logical_and logical_or logical_xor floor_divide".split()


def between(low, high, *shape):
    return (torch.rand(*shape, dtype=torch.float64, generator=RANDOM) * (high - low) + low).requires_grad_()


def truth(*shape):
    return torch.rand(*shape, generator=RANDOM) > 0.5


SAMPLES |= {
    "mv": [dict(input=normal(5, 4), vec=normal(4))],
    "dot": [dict(input=normal(5), tensor=normal(5))],
    "outer": [dict(input=normal(5), vec2=normal(4))],
    "addmm": [
        dict(input=normal(5, 7), mat1=normal(5, 4), mat2=normal(4, 7)),
        dict(input=normal(7), mat1=normal(5, 4), mat2=normal(4, 7), beta=0.5, alpha=2.0),
        dict(input=normal(5, 1), mat1=normal(5, 4), mat2=normal(4, 7)),
    ],
    "baddbmm": [
        dict(input=normal(6, 5, 7), batch1=normal(6, 5, 4), batch2=normal(6, 4, 7)),
        dict(input=normal(6, 1, 7), batch1=normal(6, 5, 4), batch2=normal(6, 4, 7), beta=0.5),
    ],
    "bilinear": [dict(input1=normal(6, 4), input2=normal(6, 5), weight=normal(7, 4, 5), bias=normal(7))],
    "einsum": [
        dict(equation="bsd,btd->bst", operands=(normal(6, 4, 5), normal(6, 7, 5))),
        dict(equation="ij,jk", operands=(normal(5, 4), normal(4, 6))),
        dict(equation="bhi,hij,j->bh", operands=(normal(5, 4, 6), normal(4, 6, 7), normal(7))),
    ],
    "where": [
        dict(condition=truth(5, 4), input=normal(5, 4), other=normal(4)),
        dict(condition=truth(5, 1), input=normal(5, 4), other=2.0),
    ],
    "lerp": [
        dict(input=normal(5, 4), end=normal(5, 4), weight=0.3),
        dict(input=normal(5, 4), end=normal(5, 4), weight=positive(5, 4)),
    ],
    "addcmul": [dict(input=normal(5, 4), tensor1=normal(5, 4), tensor2=normal(4), value=0.5)],
    "addcdiv": [dict(input=normal(5, 4), tensor1=normal(5, 4), tensor2=positive(4), value=0.5)],
    "rsub": [dict(input=normal(5, 4), other=normal(4)), dict(input=normal(5, 4), other=1.0, alpha=2)],
    "clamp": [dict(input=normal(5, 4), min=-0.5, max=0.5), dict(input=normal(5, 4), min=normal(4).detach())],
    "masked_fill": [
        dict(input=normal(5, 4), mask=truth(5, 4), value=0.0),
        dict(input=normal(5, 4), mask=truth(4), value=float("-inf")),
    ],
    "threshold": [dict(input=normal(5, 4), threshold=0.1, value=2.0)],
    "prelu": [dict(input=normal(5, 4, 6), weight=positive(4)), dict(input=normal(5, 4), weight=positive(1))],
    "glu": [dict(input=normal(5, 4, 6), dim=1)],
    "cumsum": [dict(input=normal(5, 4, 6), dim=1), dict(input=whole_numbers(7, 5, 4), dim=0)],
    "histc": [dict(input=normal(5, 4).detach(), bins=3, min=-2, max=2)],
    "cosine_similarity": [
        dict(x1=normal(5, 4, 6), x2=normal(6), dim=-1),
        dict(x1=normal(4, 6), x2=normal(5, 4, 6)),
    ],
    "affine_grid": [dict(theta=normal(5, 2, 3), size=(5, 1, 4, 6), align_corners=False)],
    "col2im": [dict(input=normal(5, 8, 6), output_size=(3, 4), kernel_size=2)],
    "rot90": [dict(input=normal(5, 4, 6), k=k, dims=(2, 1)) for k in range(4)],
    "view_as_real": [dict(input=waves(5, 4))],
    "linalg_cross": [dict(input=normal(5, 4, 3), other=normal(1, 4, 3))],
    "cumprod": [dict(input=positive(5, 4), dim=0)],
    "tril": [dict(input=normal(6, 5, 4))],
    "triu": [dict(input=normal(6, 5, 4), diagonal=1)],
    "log_softmax": [dict(input=normal(5, 4, 6), dim=-1)],
    "normalize": [dict(input=normal(5, 4, 6)), dict(input=normal(5, 4, 6), dim=-1)],
    "roll": [dict(input=normal(5, 4, 6), shifts=(1,), dims=(1,)), dict(input=normal(5, 4), shifts=2)],
    "flip": [dict(input=normal(5, 4, 6), dims=(0, 2))],
    **{
        op: [dict(input=normal(5, 4, 6), dim=1), dict(input=normal(5, 4, 6), dim=(0, 2), keepdim=True)]
        for op in ("amax", "amin", "logsumexp", "norm")
    },
    **{
        op: [dict(input=normal(5, 4, 6), dim=1), dict(input=normal(5, 4, 6), dim=1, keepdim=True)]
        for op in ("argmax", "argmin")
    },
    **{op: [dict(input=truth(5, 4, 6), dim=1), dict(input=truth(5, 4))] for op in ("all", "any")},
    "topk": [dict(input=normal(5, 6, 4), k=2, dim=1)],
    "sort": [dict(input=normal(5, 4))],
    "argsort": [dict(input=normal(5, 4), dim=0)],
    "group_norm": [
        dict(input=normal(6, 12, 5), num_groups=6, weight=normal(12), bias=normal(12)),
        dict(input=normal(6, 12, 2, 2), num_groups=6),
        dict(input=normal(6, 6, 2), num_groups=1, weight=normal(6), bias=normal(6)),
    ],
    "batch_norm": [
        dict(
            input=normal(6, 4, 5), running_mean=None, running_var=None, weight=normal(4), bias=normal(4), training=True
        ),
        dict(
            input=normal(6, 4),
            running_mean=normal(4).detach(),
            running_var=positive(4).detach(),
            weight=normal(4),
            bias=normal(4),
        ),
    ],
    "instance_norm": [dict(input=normal(6, 4, 5), weight=normal(4), bias=normal(4))],
    "weight_norm": [
        dict(v=normal(6, 4, 3), g=positive(6, 1, 1)),
        dict(v=normal(6, 4, 3), g=normal(1).sum().detach().requires_grad_(), dim=-1),
    ],
    "ctc_loss": [
        dict(
            log_probs=normal(7, 6, 5).detach().log_softmax(-1).requires_grad_(),
            targets=1 + whole_numbers(4, 6, 3),
            input_lengths=torch.tensor([7, 6, 7, 5, 7, 6]),
            target_lengths=torch.tensor([3, 1, 2, 3, 0, 2]),
        ),
        dict(
            log_probs=normal(7, 6, 5).detach().log_softmax(-1).requires_grad_(),
            targets=1 + whole_numbers(4, 11),
            input_lengths=torch.tensor([7, 6, 7, 5, 7, 6]),
            target_lengths=torch.tensor([3, 1, 2, 3, 0, 2]),
            blank=0,
        ),
    ],
    "conv1d": [
        dict(input=normal(6, 4, 9), weight=normal(8, 4, 3), bias=normal(8), padding=1),
        dict(input=normal(6, 12, 9), weight=normal(6, 2, 3), bias=normal(6), groups=6),
    ],
    "conv2d": [dict(input=normal(6, 4, 5, 5), weight=normal(8, 4, 3, 3), stride=2)],
    "conv3d": [dict(input=normal(2, 2, 3, 3, 3), weight=normal(4, 2, 2, 2, 2))],
    "conv_transpose1d": [dict(input=normal(6, 4, 5), weight=normal(4, 8, 3), bias=normal(8))],
    "conv_transpose2d": [dict(input=normal(6, 4, 3, 3), weight=normal(4, 8, 2, 2), stride=2)],
    "conv_transpose3d": [dict(input=normal(2, 2, 2, 2, 2), weight=normal(2, 4, 2, 2, 2))],
    **{
        f"{kind}{n}d": [dict(input=normal(6, 4, *[5] * n), kernel_size=2)]
        for kind in ("max_pool", "avg_pool")
        for n in (1, 2, 3)
    },
    **{f"adaptive_avg_pool{n}d": [dict(input=normal(6, 4, *[5] * n), output_size=2)] for n in (1, 2, 3)},
    "interpolate": [
        dict(input=normal(6, 4, 5), scale_factor=2),
        dict(input=normal(6, 4, 5, 5), size=(7, 7), mode="bilinear"),
    ],
    **{op: [dict(input=normal(5, 4), target=normal(5, 4), reduction="none")] for op in ("l1_loss", "smooth_l1_loss")},
    "kl_div": [dict(input=normal(5, 4), target=positive(5, 4), reduction="none")],
    "binary_cross_entropy": [
        dict(input=between(0.1, 0.9, 5, 4), target=between(0, 1, 5, 4).detach(), reduction="none")
    ],
    "binary_cross_entropy_with_logits": [
        dict(input=normal(5, 4), target=between(0, 1, 5, 4), reduction="none"),
        dict(
            input=normal(5, 4),
            target=between(0, 1, 5, 4),
            weight=positive(4).detach(),
            pos_weight=positive(4).detach(),
            reduction="none",
        ),
    ],
    "nll_loss": [
        dict(input=normal(6, 7), target=ignoring(whole_numbers(7, 6), 0, 1, 2), reduction="sum"),
        dict(input=normal(6, 7, 3), target=whole_numbers(7, 6, 3), weight=positive(7).detach(), reduction="sum"),
    ],
    "expand": [dict(input=normal(5, 1, 4), size=(6, 5, 7, 4)), dict(input=normal(4), size=(6, 4))],
    "stack": [dict(tensors=[normal(5, 4), normal(5, 4)], dim=1)],
    "unbind": [dict(input=normal(5, 3, 4), dim=1)],
    "repeat": [dict(input=normal(5, 4), repeats=(2, 1, 3))],
    "tile": [dict(input=normal(5, 4, 3), dims=(2, 1))],
    "repeat_interleave": [dict(input=normal(5, 4, 6), repeats=2, dim=1)],
    "diagonal": [dict(input=normal(6, 5, 4), dim1=1, dim2=2)],
    "slice_scatter": [dict(input=normal(5, 6), src=normal(5, 2), dim=1, start=2, end=4)],
    "select_scatter": [dict(input=normal(5, 6), src=normal(5), dim=1, index=2)],
    "gather": [
        dict(input=normal(6, 5), dim=1, index=whole_numbers(5, 6, 7)),
        dict(input=normal(6, 5), dim=0, index=whole_numbers(6, 4, 5)),
    ],
    "index_select": [dict(input=normal(6, 5), dim=1, index=whole_numbers(5, 7))],
    "scatter": [
        dict(
            input=normal(6, 5),
            dim=1,
            index=torch.stack([torch.randperm(5, generator=RANDOM)[:3] for _ in range(6)]),
            src=normal(6, 3),
        ),
        dict(input=normal(6, 5), dim=1, index=whole_numbers(5, 6, 3), src=2.0),
    ],
    "scatter_add": [
        dict(input=normal(6, 5), dim=1, index=whole_numbers(5, 6, 3), src=normal(6, 3)),
        dict(input=normal(6, 5), dim=0, index=whole_numbers(6, 3, 5), src=normal(3, 5)),
    ],
    "one_hot": [dict(input=whole_numbers(7, 5, 4), num_classes=7)],
    "index": [
        dict(input=normal(6, 5), index=whole_numbers(6, 7)),
        dict(input=normal(6, 5), index=(slice(None), whole_numbers(5, 7, 3))),
        dict(input=normal(6, 5, 4), index=(..., whole_numbers(4, 7), slice(None))),
        dict(input=normal(6, 5), index=(slice(None), slice(1, None, 2))),
        dict(input=normal(6, 5, 4), index=(..., 2)),
        dict(input=normal(6, 5, 4), index=(None, slice(0, 5, 3), slice(None), 1)),
        dict(input=normal(6, 5, 4), index=(..., [-2], slice(None))),
        dict(input=normal(6, 5, 4), index=[3, 0, 3]),
    ],
    "full_like": [dict(input=normal(5, 4), fill_value=2.0)],
    "zeros_like": [dict(input=normal(5, 4))],
    "ones_like": [dict(input=normal(5, 4))],
    **{op: [dict(input=normal(5, 4), other=positive(5, 4))] for op in FLOAT_PAIRS},
    **{op: [dict(input=whole_numbers(5, 6, 4), other=whole_numbers(5, 4) + 1)] for op in WHOLE_PAIRS},
    **{op: [dict(input=between(-0.9, 0.9, 5, 4))] for op in ("acos", "asin", "atanh")},
    **{op: [dict(input=positive(5, 4))] for op in ("log1p", "log2", "log10", "reciprocal")},
    **{op: [dict(input=whole_numbers(5, 6, 4))] for op in ("bitwise_not", "logical_not")},
    "grouped_mm": [  # float64 has no kernel; the kernels take rows of whole 16 bytes, and parts are none
        dict(
            mat_a=normal(12, 6).detach().float().requires_grad_(),
            mat_b=normal(3, 6, 10).detach().float().requires_grad_(),
            offs=torch.tensor([3, 8, 12], dtype=torch.int32),
        )
    ],
    "diff": [dict(input=normal(5, 4)), dict(input=normal(6, 5), dim=0, prepend=normal(1, 5))],
    "batch_norm_updating": [
        dict(
            input=normal(6, 5, 4),
            running_mean=normal(5).detach(),
            running_var=positive(5).detach(),
            weight=normal(5),
            bias=normal(5),
            training=True,
        )
    ],
    "instance_norm_updating": [
        dict(
            input=normal(6, 5, 4),
            running_mean=normal(5).detach(),
            running_var=positive(5).detach(),
            weight=normal(5),
            bias=normal(5),
        )
    ],
    **{op: [dict(size=(6, 5))] for op in ("zeros", "ones")},
    "full": [dict(size=(6, 5), fill_value=2.0)],
    "empty": [],
    "empty_like": [],
    **{
        op: []
        for op in (
            "dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout bernoulli multinomial rand randn "
            "rand_like randn_like uniform_like normal_like exponential_like "
            "log_normal_like cauchy_like random_like geometric_like normal normal_filled randint randperm poisson "
            "standard_gamma dirichlet rrelu"
        ).split()
    },  # draws go by position: tests/equality/test_draws.py runs them on ranks
    "arange": [],  # counts from where its part begins: there too
    "pixel_shuffle": [dict(input=normal(5, 24, 6, 3), upscale_factor=2)],
    "diagonal_scatter": [dict(input=normal(6, 5, 4), src=normal(6, 4), dim1=1, dim2=2)],
    "copy": [dict(input=normal(6, 5), source=normal(5)), dict(input=whole_numbers(5, 6, 4), source=normal(6, 4))],
    "setitem": [
        dict(input=normal(6, 5), index=(slice(None), torch.tensor([3, 0, 4])), value=normal(6, 3)),
        dict(input=normal(6, 5), index=torch.tensor([True, False, True, True, False, False]), value=normal(3, 5)),
        dict(input=normal(6, 5, 4), index=(..., torch.tensor([[3, 0]]), slice(None)), value=2.0),
        dict(input=normal(6, 5, 4), index=torch.tensor([3, 0]), value=normal(5, 1)),
        dict(input=normal(6, 5, 4), index=(..., slice(1, None, 3)), value=normal(5, 1)),
        dict(input=normal(6, 5, 4), index=(slice(None), 2, slice(0, 4, 2)), value=0.5),
    ],
    **{op: [dict(input=normal(6, 5, 4)), dict(input=normal(6, 5, 4), n=7, dim=1)] for op in ("fft", "rfft", "ihfft")},
    **{op: [dict(input=waves(6, 5, 4)), dict(input=waves(6, 5, 4), n=7, dim=1)] for op in ("ifft", "irfft", "hfft")},
    **{op: [dict(input=normal(6, 5, 4)), dict(input=normal(6, 5, 4), dim=(0, 1))] for op in ("fft2", "rfft2")},
    **{op: [dict(input=waves(6, 5, 4)), dict(input=waves(6, 5, 4), dim=(0, 1))] for op in ("ifft2", "irfft2")},
    **{op: [dict(input=normal(6, 5, 4), s=(3, 4))] for op in ("fftn", "rfftn", "ihfftn")},
    **{op: [dict(input=waves(6, 5, 4), dim=(1,)), dict(input=waves(6, 5))] for op in ("ifftn", "irfftn", "hfftn")},
    "hfft2": [dict(input=waves(6, 5, 4))],
    "ihfft2": [dict(input=normal(6, 5, 4))],
    **{op: [dict(input=normal(6, 5, 4)), dict(input=waves(6, 5), dim=1)] for op in ("fftshift", "ifftshift")},
    "stft": [
        dict(input=normal(6, 32), n_fft=8, hop_length=4, window=positive(8), return_complex=True),
        dict(input=normal(32), n_fft=8, onesided=False, return_complex=False),
    ],
    "istft": [dict(input=waves(6, 5, 9), n_fft=8, window=positive(8)), dict(input=waves(5, 9), n_fft=8, length=20)],
    **{
        op: [dict(input=normal(6, 5), hx=hx, w_ih=normal(n * 4, 5), w_hh=normal(n * 4, 4), b_ih=normal(n * 4))]
        for op, n, hx in (("lstm_cell", 4, (normal(6, 4), normal(6, 4))), ("gru_cell", 3, normal(6, 4)))
    },
}

SAMPLES["attention"] = [  # The last, as it draws numbers.
    described("right=0", documents=True, sinks=True),
    described("left=3 right=0"),
    described("right=0 softcap=1.5", counts=True),
]

# Ops without a sample here: torch's own table of functions has calls of them, which test_every_function.py proves. It
# leaves out choices along marks (~, ^), so that an op with a local form needs samples here.
OF_TORCH = frozenset(
    """
    acosh adaptive_max_pool1d adaptive_max_pool1d_with_indices adaptive_max_pool2d adaptive_max_pool2d_with_indices
    adaptive_max_pool3d adaptive_max_pool3d_with_indices addbmm addmv addr airy_ai aminmax bessel_y0 bessel_y1
    bitwise_left_shift bitwise_right_shift bucketize cdist channel_shuffle chebyshev_polynomial_t
    chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w cholesky cholesky_inverse cholesky_solve
    copysign count_nonzero cummax cummin det diag_embed eigh eigvalsh embedding_bag entr erfinv fmax fmin frexp gcd
    grid_sample heaviside hermite_polynomial_h hermite_polynomial_he huber_loss hypot igamma igammac im2col
    index_add index_copy index_fill index_put index_reduce inverse isclose isin kthvalue laguerre_polynomial_l lcm
    ldexp legendre_polynomial_p linalg_cholesky linalg_qr linalg_svd logaddexp2 logcumsumexp logdet logit lu_factor
    masked_scatter matrix_exp matrix_power max max_pool1d_with_indices max_pool2d_with_indices
    max_pool3d_with_indices max_unpool1d max_unpool2d max_unpool3d median min mode modified_bessel_k0
    modified_bessel_k1 multi_margin_loss multilabel_margin_loss mvlgamma nanmedian nanquantile nansum ndtri
    nextafter nonzero_static pdist pinv pixel_unshuffle polygamma prod quantile renorm scaled_modified_bessel_k0
    scaled_modified_bessel_k1 scatter_reduce searchsorted slogdet soft_margin_loss solve solve_triangular
    spherical_bessel_j0 std std_mean svd svdvals t take take_along_dim trace unfold var var_mean vector_norm
    view_as_complex xlog1py xlogy zeta
    """.split()
)
# Ops without a sample here that are tried as parts of models.
OF_MODELS = frozenset("gru lstm rnn_relu rnn_tanh".split())  # equality/test_recurrent.py
OF_TURNS = frozenset("once turn chunk".split())  # tests/turns: passes make them, no model calls them


def is_plain(op):
    """Is it pointwise, and finite on ordinary numbers?"""
    if str(FACTS[op].rule) not in ("... -> ...", "... -> ...   linear=x"):
        return False
    try:
        return bool(
            torch.isfinite(
                OPS[op].run(
                    dict(input=torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(3)))
                )
            ).all()
        )
    except TypeError:
        return False


def samples(op):
    return SAMPLES.get(op, [dict(input=normal(5, 4))])

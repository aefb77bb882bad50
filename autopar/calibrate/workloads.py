"""Calls of each op that `autopar calibrate` times, by size, as emitted programs run them.

They are traced with their gradients to straight-line ATen code.

    amount      elements of the largest tensor of the call; of a product its FLOPs
    forward     seconds of the call
    backward    seconds of its gradients; of a product, of the gradient of one operand

The names are those of `autopar.sharding.costs.named`: an op by its canonical name, followed by how it is called where
that matters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.codegen.buffers import read_instead
from autopar.runtime import collectives, forms  # noqa: F401 - forms trace conversions
from autopar.runtime.private import FakeTensorMode
from autopar.sharding.cost_model import BROADCAST

_COLOURS = 3
WIDTH = 256  # elements of a row; tensors larger than any on a CPU have WIDE rows
WIDE = 2048
# Sizes go from caches to fresh memory, which cost differently.
ELEMENTS = (2**8, 2**12, 2**15, 2**17, 2**19, 2**20, 2**22)
ON_GPU = (2**8, 2**14, 2**18, 2**20, 2**22, 2**24, 2**26)
# A function and its operands: those of floating point are trained, but for buffers.
Call = tuple[Callable[..., Any], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Workload:
    """Calls of one op, by size."""

    name: str
    call: Callable[[Any], Call]
    sizes: Sequence[Any] = ELEMENTS
    on_gpu: Sequence[Any] = ON_GPU  # sizes that fill one
    amount: Callable[[Any], float] = float
    # The second size of a call on a GPU, on which its seconds depend too; 0 where there is none.
    second_on_gpu: Callable[[Any], float] = lambda size: 0.0
    gradients: Callable[[Any], int] = lambda size: 1  # products in its backward
    is_last: bool = False  # runs where a step holds most, so its results need new memory of the process

    def sizes_on(self, device: str) -> Sequence[Any]:
        return self.on_gpu if device == "cuda" else self.sizes

    def at(self, size: Any, device: str) -> float:
        """The second size of a call, as in `Timed.at`; 0 where there is none."""
        return self.second_on_gpu(size) if device == "cuda" else 0.0


def rows(n: int, width: int = 0) -> Tensor:
    """Random numbers in (0.5, 1.5), where every op is defined, in rows."""
    width = width or (WIDTH if n <= ELEMENTS[-1] else WIDE)
    return torch.rand(max(1, n // width), min(n, width)) + 0.5


def _unary(function: Callable[[Tensor], Any]) -> Callable[[int], Call]:
    return lambda n: (function, (rows(n),))


def _binary(function: Callable[[Tensor, Tensor], Any]) -> Callable[[int], Call]:
    return lambda n: (function, (rows(n), rows(n)))


def _broadcast(function: Callable[[Tensor, Tensor], Any]) -> Callable[[int], Call]:
    """An op of rows and of one row, which gets no gradient: that is a kernel of another kind."""

    def call(n: int) -> Call:
        x = rows(n)
        return function, (x, torch.nn.Buffer(torch.rand(x.shape[1]) + 0.5))

    return call


def _linear(size: tuple[int, int, int]) -> Call:
    r, k, n = size
    return F.linear, (torch.randn(r, k), torch.randn(n, k) / k**0.5)


def _matmul(size: tuple[int, int, int, int]) -> Call:
    b, m, k, n = size
    return torch.matmul, (torch.randn(b, m, k), torch.randn(b, k, n) / k**0.5)


def _grouped(size: tuple[int, int, int, int]) -> Call:
    """Rows of several groups, each of which has a matrix of its own, as experts have."""
    groups, m, k, n = size
    ends = torch.arange(1, groups + 1, dtype=torch.int32) * m
    matrices = torch.randn(groups, k, n) / k**0.5
    return lambda x, w, ends: F.grouped_mm(x, w, offs=ends), (torch.randn(groups * m, k), matrices, ends)


def _attention(**how: bool) -> Callable[[tuple[int, int, int, int]], Call]:
    def call(size: tuple[int, int, int, int]) -> Call:
        b, h, s, d = size
        heads = tuple(torch.randn(b, s, h, d) for _ in range(3))  # laid out as a linear leaves them
        if "masked" in how:
            mask = torch.ones(b, 1, s, s, dtype=torch.bool).tril()
            return lambda q, k, v, mask: F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask
            ), (*heads, mask)
        return lambda q, k, v: F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **how
        ), heads

    return call


@dataclass(frozen=True, slots=True)
class Windows:
    """The sizes of a convolution of square images: of the batch, the channels, a side, a window and its step."""

    batch: int
    entering: int  # channels of the input
    leaving: int  # channels of the result
    side: int
    window: int
    step: int = 1

    def call(self) -> Call:
        weight = torch.randn(self.leaving, self.entering, self.window, self.window)
        padding = self._padding
        images = torch.randn(self.batch, self.entering, self.side, self.side)
        if self.are_pictures:
            images = torch.nn.Buffer(images)
        return lambda x, w: F.conv2d(x, w, stride=self.step, padding=padding), (images, weight)

    @property
    def are_pictures(self) -> bool:
        """Whether the images are those of a batch, of three colours: nothing needs their gradient."""
        return self.entering == _COLOURS

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.leaving * self._places * self.entering * self.window**2

    @property
    def intensity(self) -> float:
        """FLOPs for each element of the images and of the result."""
        elements = self.entering * self.side**2 + self.leaving * self._places
        return self.flops / (self.batch * elements)

    @property
    def _padding(self) -> int:
        return 0 if self.step >= self.window else self.window // 2

    @property
    def _places(self) -> int:
        return ((self.side + 2 * self._padding - self.window) // self.step + 1) ** 2


def _embedding(function: Callable[..., Tensor]) -> Callable[[int], Call]:
    def call(n: int) -> Call:
        table = rows(n)
        found = len(table) if n <= ELEMENTS[-1] else len(table) // 8  # a batch reads a part of a large vocabulary
        return function, (torch.randint(0, len(table), (found,)), table)

    return call


def _cross_entropy(function: Callable[..., Tensor]) -> Callable[[int | tuple[int, int]], Call]:
    def call(size: int | tuple[int, int]) -> Call:
        logits = torch.rand(*size) + 0.5 if isinstance(size, tuple) else rows(size, 2048)
        return function, (logits, torch.randint(0, logits.shape[1], (len(logits),)))

    return call


def _row_sums(size: int | tuple[int, int]) -> Call:
    return lambda x: x.sum(0), (_rows_of(size),)


def _rows_of(size: int | tuple[int, int]) -> Tensor:
    """Rows by their number and width, or by their number of elements."""
    return torch.rand(*size) + 0.5 if isinstance(size, tuple) else rows(size)


def _norm(function: Callable[..., Tensor], weights: int) -> Callable[[int | tuple[int, int]], Call]:
    def call(size: int | tuple[int, int]) -> Call:
        x = _rows_of(size)
        return function, (x, *(torch.ones(x.shape[-1]) for _ in range(weights)))

    return call


def _batch_norm(function: Callable[..., Tensor]) -> Callable[[int | tuple[int, int, int]], Call]:
    def call(size: int | tuple[int, int, int]) -> Call:
        if isinstance(size, tuple):
            x = _picture(size)
        else:
            channels = min(64, size // 4)
            x = torch.rand(max(1, size // channels // 64), channels, min(64, size // channels))
        return function, (x, torch.ones(x.shape[1]), torch.ones(x.shape[1]))

    return call


def _picture(size: int | tuple[int, int, int]) -> Tensor:
    """Images by batch, channels and side, or by their number of elements."""
    if isinstance(size, tuple):
        batch, channels, side = size
        return torch.rand(batch, channels, side, side)
    return torch.rand(max(1, size // 4096), min(16, size // 64), 16, min(16, max(1, size // 256)))


def _elements(size: int | tuple[int, ...]) -> float:
    """Elements of rows by (rows, width), of images by (batch, channels, side), or the number itself."""
    if not isinstance(size, tuple):
        return float(size)
    return float(math.prod(size) * math.prod(size[2:]))


# rows, and what they are multiplied by: the narrower that is, the more of the time is that of reading and writing rows
_GPU_PRODUCTS = tuple(
    (rows, width, width)
    for width, most in ((64, 65536), (256, 65536), (768, 65536), (2048, 65536), (4096, 32768), (16384, 8192))
    for rows in (64, 2048, most)
)
_GPU_BATCHED = ((16, 64, 64, 64), (64, 256, 64, 256), (64, 1024, 64, 1024), (256, 1024, 128, 1024))
# Experts of the shapes that models have, from few rows of each to many.
_GPU_GROUPED = ((32, 16, 2048, 768), (128, 64, 2048, 768), (64, 512, 2048, 1408), (8, 2048, 4096, 14336))
# several for each length, from few heads to more than there are multiprocessors: each length has a rate of its own
_GPU_HEADS = (
    (1, 4, 128, 64),
    (32, 12, 128, 64),
    (256, 12, 128, 64),
    (1, 12, 256, 64),
    (16, 12, 256, 64),
    (256, 12, 256, 64),
    (1, 12, 512, 64),
    (4, 12, 512, 64),
    (64, 16, 512, 64),
    (1, 16, 1024, 64),
    (8, 16, 1024, 64),
    (16, 16, 1024, 64),
    (1, 32, 2048, 64),
    (8, 32, 2048, 64),
    (1, 32, 4096, 128),
    (4, 32, 4096, 128),
)
# the fewer channels, the more of the time is that of reading, of writing, and of turning images round
_GPU_IMAGES = tuple(
    Windows(batch, *sizes)
    for sizes in ((3, 64, 224, 7, 2), (64, 64, 56, 3), (128, 128, 28, 3), (256, 256, 14, 3), (512, 512, 7, 3))
    for batch in (1, 16, 64, 256)
)
_GPU_POINTS = tuple(
    Windows(batch, *sizes, window=1)
    for sizes in ((64, 64, 56), (64, 256, 56), (128, 512, 28), (256, 1024, 14), (512, 2048, 7))
    for batch in (1, 16, 64, 256)
)
_GPU_PATCHES = tuple(Windows(batch, 3, channels, 224, 16, 16) for channels in (192, 768) for batch in (1, 16, 64, 256))
_GPU_PICTURES = ((1, 4, 8), (1, 64, 16), (4, 64, 32), (16, 64, 32), (64, 64, 32), (128, 128, 32), (128, 256, 56))
# torch's kernels go over a channel in one block: few channels leave most units without work
_GPU_CHANNELS = (
    (1, 64, 16),
    (16, 64, 32),
    (64, 64, 56),
    (256, 64, 112),
    (1, 256, 14),
    (16, 256, 28),
    (256, 256, 28),
    (256, 256, 56),
    (1, 1024, 7),
    (16, 1024, 14),
    (256, 1024, 14),
)
# rows of no whole number of 16 bytes, as of vocabularies that nobody rounded up
_UNALIGNED = ((64, 64, 63), (1024, 1024, 1021), (4096, 1024, 2047), (8192, 1024, 8191), (8192, 1024, 50257))
_PRODUCTS = ((8, 64, 64), (64, 64, 128), (256, 128, 128), (256, 256, 512), (1024, 256, 512), (1024, 512, 1024))
_BATCHED = ((4, 16, 16, 16), (8, 32, 32, 32), (16, 64, 32, 64), (32, 128, 32, 128), (64, 128, 64, 128))
_HEADS = ((1, 1, 32, 32), (2, 2, 128, 32), (2, 8, 128, 32), (8, 8, 128, 32), (8, 8, 256, 64))
_SQUARES = ((1, 4), (1, 16), (4, 16), (8, 32))
_IMAGES = tuple(Windows(batch, 64, 64, side, 3) for batch, side in _SQUARES)
_POINTS = tuple(Windows(batch, 64, 64, side, 1) for batch, side in _SQUARES)
_PATCHES = tuple(Windows(batch, 3, 128, side, 8, 8) for batch, side in ((1, 16), (1, 64), (4, 64), (8, 128)))
# torch's sums over rows, of the gradients of weights, take as long as there are few columns
_GPU_ROWS = tuple(
    (rows, width)
    for width, most in ((256, 65536), (768, 65536), (2048, 32768), (8192, 8192))
    for rows in (64, 2048, most)
)
# a softmax that fits into a block's memory reads its row once, that of a vocabulary several times
_GPU_LOGITS = tuple(
    (rows, classes) for classes, most in ((2048, 32768), (32768, 8192), (131072, 4096)) for rows in (16, 512, most)
)


def _pairs(size: tuple[int, int, int, int]) -> float:
    b, h, s, d = size
    return 4.0 * b * h * s * s * d


def _length(size: tuple[int, int, int, int]) -> float:
    return float(size[2])


def _channels(size: tuple[int, int, int]) -> float:
    return float(size[1])


def _width(size: tuple[int, int]) -> float:
    return float(size[1])


def _harmonic(size: tuple[int, int, int]) -> float:
    """FLOPs of a product of rows for each element of the rows and of the result."""
    _, k, n = size
    return 2.0 * k * n / (k + n)


def _flops(size: Windows) -> float:
    return size.flops


def _intensity(size: Windows) -> float:
    return size.intensity


def _both(size: Any) -> int:
    """The products in the backward of one of two trained operands."""
    return 2


def _of_windows(size: Windows) -> int:
    return 1 if size.are_pictures else 2


WORKLOADS: tuple[Workload, ...] = (
    Workload("linear", _linear, _PRODUCTS, _GPU_PRODUCTS, lambda s: 2.0 * math.prod(s), _harmonic, gradients=_both),
    Workload("linear unaligned", _linear, (), _UNALIGNED, lambda s: 2.0 * math.prod(s), gradients=_both),
    Workload("matmul", _matmul, _BATCHED, _GPU_BATCHED, lambda s: 2.0 * math.prod(s), gradients=_both),
    Workload("grouped_mm", _grouped, _BATCHED, _GPU_GROUPED, lambda s: 2.0 * math.prod(s), gradients=_both),
    Workload("scaled_dot_product_attention", _attention(), _HEADS, _GPU_HEADS, _pairs, _length),
    Workload("scaled_dot_product_attention causal", _attention(is_causal=True), _HEADS, _GPU_HEADS, _pairs, _length),
    Workload("scaled_dot_product_attention masked", _attention(masked=True), _HEADS, _GPU_HEADS, _pairs, _length),
    *(
        Workload(name, Windows.call, sizes, on_gpu, _flops, _intensity, gradients=_of_windows)
        for name, sizes, on_gpu in (
            ("conv2d", _IMAGES, _GPU_IMAGES),
            ("conv2d points", _POINTS, _GPU_POINTS),
            ("conv2d apart", _PATCHES, _GPU_PATCHES),
        )
    ),
    *(
        Workload(name, _unary(getattr(torch, name)))
        for name in ("tanh", "sigmoid", "relu", "exp", "log", "sqrt", "rsqrt", "cos", "sin", "neg", "abs", "square")
    ),
    *(Workload(name, _unary(getattr(F, name))) for name in ("gelu", "silu")),
    Workload("gelu tanh", _unary(lambda x: F.gelu(x, approximate="tanh"))),
    Workload("pow", _unary(lambda x: torch.pow(x, 3))),
    Workload("pow 2", _unary(lambda x: torch.pow(x, 2))),
    *(Workload(name, _binary(getattr(torch, name)), gradients=_both) for name in ("add", "sub", "mul", "div")),
    *(
        Workload(f"{name}{BROADCAST}", _broadcast(getattr(torch, name)), (), ON_GPU)
        for name in ("add", "sub", "mul", "div")
    ),
    *(
        Workload(f"{name} number", _unary(function))
        for name, function in {"add": lambda x: x + 1.5, "mul": lambda x: x * 1.5, "div": lambda x: x / 1.5}.items()
    ),
    Workload("where", lambda n: (lambda c, x: torch.where(c, x, 0.0), (rows(n) > 1, rows(n)))),
    Workload("masked_fill", lambda n: (lambda x, c: x.masked_fill(c, 0.0), (rows(n), rows(n) > 1))),
    Workload("sum", _unary(lambda x: x.sum(-1))),
    Workload("sum over rows", _row_sums, on_gpu=_GPU_ROWS, amount=_elements, second_on_gpu=_width),
    Workload("mean", _unary(lambda x: x.mean(-1, keepdim=True))),
    Workload("softmax", _unary(lambda x: x.softmax(-1))),
    Workload("log_softmax", _unary(lambda x: x.log_softmax(-1))),
    *(
        Workload(name, _norm(function, weights), on_gpu=_GPU_ROWS, amount=_elements, second_on_gpu=_width)
        for name, function, weights in (
            ("layer_norm", lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), 2),
            ("rms_norm", lambda x, w: F.rms_norm(x, x.shape[-1:], w), 1),
        )
    ),
    Workload(
        "batch_norm_updating",
        _batch_norm(lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True)),
        on_gpu=_GPU_CHANNELS,
        amount=_elements,
        second_on_gpu=_channels,
    ),
    Workload(
        "batch_norm_updating cut",
        _batch_norm(lambda x, w, b: forms.batch_norm_part(x, None, None, (), x.numel() // len(w), False, w, b)),
        on_gpu=_GPU_CHANNELS,
        amount=_elements,
        second_on_gpu=_channels,
    ),
    Workload(
        "max_pool2d",
        lambda n: (lambda x: F.max_pool2d(x, 3, 2, 1), (_picture(n),)),
        on_gpu=_GPU_PICTURES,
        amount=_elements,
    ),
    Workload(
        "dropout",
        lambda n: (
            lambda x, key: forms.dropout_by_position(x, key, 0, tuple(x.shape), ((),) * x.dim(), 0.1),
            (rows(n), torch.full((), 7)),
        ),
    ),
    Workload("embedding", _embedding(F.embedding)),
    Workload("embedding cut", _embedding(lambda i, w: forms.embedding_part(i, w, ()))),
    *(
        Workload(
            name,
            _cross_entropy(function),
            on_gpu=_GPU_LOGITS,
            amount=_elements,
            second_on_gpu=_width,
            is_last=True,
        )
        for name, function in (
            ("cross_entropy", F.cross_entropy),
            ("cross_entropy cut", lambda x, t: forms.cross_entropy_part(x, t, (), x.shape[1])),
        )
    ),
    Workload("clone", _unary(torch.clone)),
    Workload(
        "copy turned",
        lambda n: (lambda x: x.view(-1, min(8, x.shape[0]), x.shape[1]).transpose(0, 1).contiguous(), (rows(n),)),
    ),
    Workload("cat", lambda n: (lambda x, y: torch.cat([x, y], -1), (rows(n // 2), rows(n // 2)))),
    Workload("split", _unary(lambda x: x.split(x.shape[1] // 2, 1))),
    Workload("narrow", _unary(lambda x: x.narrow(1, 0, x.shape[1] // 2))),
    Workload("select", lambda n: (lambda x: x.select(1, 0), (rows(n).unflatten(-1, (4, -1)),))),
    Workload("expand", lambda n: (lambda x: x.expand(4, *x.shape), (rows(n // 4),))),
    Workload("to", lambda n: (lambda x: x.to(torch.float32), (rows(n).bfloat16(),))),
)


def traced(call: Call, backward: bool, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Callable[[], Any]:
    """The call as ATen code on a device in a dtype; with `backward`, the code also makes the gradients.

    The gradients that arrive at the results are drawn, for products of ones draw less power, and are faster. Only
    operands of dtype float32 are cast; buffers get no gradient.
    """
    function = call[0]
    operands = tuple(_as(x.to(device), dtype) for x in call[1])
    still = [isinstance(x, torch.nn.Buffer) for x in call[1]]
    trained = [i for i, x in enumerate(operands) if x.is_floating_point() and not still[i]]

    def step(xs: list[Tensor], ts: list[Tensor]) -> list[Tensor]:
        xs = [x.detach().requires_grad_(backward and i in trained) for i, x in enumerate(xs)]
        made = _flat(function(*xs))
        return [*made, *torch.autograd.grad(made, [xs[i] for i in trained], ts)] if backward else made

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(x) for x in operands]
        tangents = [torch.empty_like(r) for r in _flat(function(*fakes))] if backward else []
        graph = make_fx(step)(fakes, tangents)
    for target in (
        torch.ops.aten.detach.default,
        torch.ops.autopar.convert.default,
    ):  # an axis of one device: nothing to exchange
        for node in graph.graph.find_nodes(op="call_function", target=target):
            read_instead(node, node.args[0])
            graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    # a step holds what forward made until backward has read it: no result takes the memory of one that has ended
    made = [n for n in graph.graph.nodes if n.op == "call_function" and isinstance(n.meta.get("val"), Tensor)]
    end = graph.graph.output_node()
    end.args = ([*end.args[0], *(n for n in made if n not in end.args[0])],)
    graph.graph.set_codegen(fx.graph.CodeGen())  # lists come as what is in them
    graph.recompile()
    forward = graph.forward
    given = [*operands, *(torch.randn(t.shape, device=device, dtype=t.dtype) for t in tangents)]
    return lambda: forward(*given)


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.dtype == torch.float32 else x


def _flat(made: Any) -> list[Tensor]:
    return list(made) if isinstance(made, (tuple, list)) else [made]

"""Throughput and memory of orders as the zero-bubble paper measured them (arXiv 2401.10241, tables 3 and 4).

    python -m benchmarks.zero_bubble

Four models, four orders of each and three numbers of micro-batches, on A100s. The paper states what a prediction needs:
layers, width, heads, length, stages, rows of a micro-batch. Seconds are FLOPs and bytes are formulas of its table 1:

    a layer, of s tokens in each of b rows, width h, a heads      forward     s b h (24 h + 4 s) FLOPs
                                                                  inputs      s b h (24 h + 8 s)
                                                                  weights     s b h 24 h
    from F to B                                                   s b h (34 + 5 a s / h) bytes
    from B to W                                                   32 s b h

A parameter takes 18 bytes, as Megatron's documentation says of half precision with sums of gradients in float32; the
paper does not say which precision it took. Table and head are blocks of their own: the first and the last stage have a
layer less. A step of 1F1B ends with its last coordinate; with ZB orders the paper checks norms after the step, so that
each coordinate begins the next one by itself. Nothing is fitted, and transfers take no time. ZB-1p and ZB-2p, which the
paper's own search finds, are stood in for by ZB-H1 and by the greedy order with twice as many micro-batches in flight
as there are stages.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from autopar.stages import Atoms, Block, order_of, simulated
from benchmarks.pipelines import even

VOCABULARY = 50304  # GPT-2's, padded as Megatron does
PARAMETER = 18  # bytes
BAR = 0.05


@dataclass(frozen=True)
class Model:
    """A GPT on so many stages; `rows` are those of a micro-batch."""

    name: str
    layers: int
    heads: int
    width: int
    coordinates: int
    rows: int
    turns: tuple[int, ...]
    length: int = 1024

    def atoms(self) -> Atoms:
        """The table, the layers and the head, as blocks: FLOPs and bytes of a micro-batch."""
        h = self.width
        tokens = self.length * self.rows
        table = VOCABULARY * h
        products = 24.0 * tokens * h * h
        scores = 4.0 * tokens * h * self.length
        saved = tokens * h * (34 + 5 * self.heads * self.length / h)
        layer = Block(
            products + scores, products + 2 * scores, products, PARAMETER * 12.0 * h * h, saved, 32.0 * tokens * h
        )
        embedding = Block(standing=PARAMETER * float(table + self.length * h), saved=float(tokens * h))
        logits = 2.0 * tokens * table
        head = Block(logits, logits, logits, PARAMETER * float(table), 4.0 * tokens * (h + VOCABULARY))
        return Atoms((embedding, *[layer] * self.layers, head))


@dataclass(frozen=True)
class Measured:
    """What the paper measured of an order: rows a second of a device, by number of micro-batches, and memory in GB."""

    order: str
    rates: tuple[float, ...]
    memory: float


ORDERS = ("1F1B", "1F1B-I", "ZB-1p", "ZB-2p")
TABLE = (
    (
        Model("1.5B", 22, 24, 2304, 8, 6, (24, 32, 64)),
        Measured("1F1B", (11.8, 12.5, 13.6), 30),
        Measured("1F1B-I", (13.1, 13.4, 13.9), 40),
        Measured("ZB-1p", (12.9, 13.4, 14.2), 32),
        Measured("ZB-2p", (14.5, 14.8, 14.9), 59),
    ),
    (
        Model("6.2B", 30, 32, 4096, 8, 3, (24, 32, 64)),
        Measured("1F1B", (3.50, 3.70, 4.03), 39),
        Measured("1F1B-I", (4.01, 4.08, 4.19), 48),
        Measured("ZB-1p", (3.88, 4.00, 4.20), 42),
        Measured("ZB-2p", (4.32, 4.35, 4.39), 70),
    ),
    (
        Model("14.6B", 46, 40, 5120, 16, 1, (48, 64, 128)),
        Measured("1F1B", (1.40, 1.49, 1.64), 32),
        Measured("1F1B-I", (1.54, 1.59, 1.66), 39),
        Measured("ZB-1p", (1.61, 1.67, 1.76), 33),
        Measured("ZB-2p", (1.81, 1.83, 1.85), 51),
    ),
    (
        Model("28.3B", 62, 48, 6144, 32, 1, (96, 128, 256)),
        Measured("1F1B", (0.76, 0.80, 0.88), 43),
        Measured("1F1B-I", (0.82, 0.85, 0.90), 58),
        Measured("ZB-1p", (0.87, 0.90, 0.96), 44),
        Measured("ZB-2p", (0.99, 1.00, 1.00), 74),
    ),
)


def predicted(model: Model, order: str, turns: int) -> tuple[float, float]:
    """FLOPs that pass from one step to the next on the slowest coordinate, and bytes of the fullest one."""
    p = model.coordinates
    atoms = model.atoms()
    blocks = len(atoms.blocks)
    name, each = {"1F1B": ("1f1b", 1), "1F1B-I": ("interleaved", blocks // p), "ZB-1p": ("zero-bubble", 1)}.get(
        order, ("greedy", 1)
    )
    prices, stages = atoms.prices(even(blocks, p * each))
    made = order_of(name, p, turns, each, prices, (2 * p,) * p if order == "ZB-2p" else None)
    held = list(made.most_held([stage.saved for stage in stages], [stage.kept for stage in stages]))
    for at, stage in zip(made.place, stages, strict=True):
        held[at] += stage.standing
    run = simulated(made, prices)
    if order.startswith("ZB"):  # No coordinate waits for others between two steps.
        return max(ends[-1] - starts[0] for starts, ends in zip(run.starts, run.ends, strict=True)), max(held)
    return run.seconds, max(held)


def lines() -> Iterator[str]:
    """The table, and what it says of the bars."""
    yield "| model | order | n | rate, published | predicted | error | memory, published | predicted | error | GiB |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    rates: list[float] = []
    memories: list[float] = []
    for model, base, *others in TABLE:
        before = [predicted(model, base.order, turns) for turns in model.turns]
        yield f"| {model.name} | {base.order} |  |  |  |  |  |  |  | {before[0][1] / 2**30:.1f} of {base.memory:g} |"
        for row in others:
            for k, turns in enumerate(model.turns):
                seconds, held = predicted(model, row.order, turns)
                rate = before[k][0] / seconds
                wanted = row.rates[k] / base.rates[k]
                rates.append(rate / wanted - 1)
                cells = f"{row.order} | {turns} | {wanted:.3f} | {rate:.3f} | {100 * rates[-1]:+.1f} %"
                if k:
                    yield f"| {model.name} | {cells} |  |  |  |  |"
                    continue
                memory = held / before[0][1]
                memories.append(memory / (row.memory / base.memory) - 1)
                cells += f" | {row.memory / base.memory:.2f} | {memory:.2f} | {100 * memories[-1]:+.1f} %"
                yield f"| {model.name} | {cells} | {held / 2**30:.1f} of {row.memory:g} |"
    for what, errors in (("Throughput", rates), ("Memory", memories)):
        over = sum(abs(error) > BAR for error in errors)
        median = statistics.median(map(abs, errors))
        yield f"\n{what}: median error {100 * median:.1f} % of {len(errors)} ratios to 1F1B, {over} of them over 5 %."


def main() -> int:
    for line in lines():
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

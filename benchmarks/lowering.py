"""CPU seconds to lower LLaMA-8B's shape, 32 layers, for the first of 64 devices, and to go on with another sequence
length.

python -m benchmarks.lowering       medians of five; fails where lowering takes more than 15 s, a new length more than
3 s, or a plan that recomputes 60 % of its values more than 1.3 times what the same without takes
"""

from __future__ import annotations

import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers

import autopar
from autopar.codegen import joint, lower
from autopar.request import Request
from autopar.search import plan_again, plan_of

LOWERING_S, NEW_LENGTH_S, TIMES = 15.0, 3.0, 5
SHARE, TIMES_AS_LONG = 0.6, 1.3  # of a plan's values that backward recomputes, drawn; and the most that it may take


def batch(length: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros(64, length, dtype=torch.long)
    return {"input_ids": ids, "labels": ids.clone()}


def main() -> None:
    torch.set_num_threads(1)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                num_hidden_layers=32,
                hidden_size=4096,
                intermediate_size=14336,
                num_attention_heads=32,
                num_key_value_heads=8,
                vocab_size=128256,
            )
        ).train()
    request = Request((8, 8), "h100-8x8", assume=autopar.Assume(no_padding=True))
    taken: dict[str, list[float]] = {}

    def timed(what: str, work: Callable[[], Any]) -> Any:
        start = time.process_time()
        result = work()
        taken.setdefault(what, []).append(time.process_time() - start)
        return result

    for _ in range(TIMES):
        joint.LOWERED.clear()
        graph = timed("trace", lambda: request.trace(model, batch(2048)))
        plan = timed("plan", lambda: plan_of(graph, request))
        timed("lower", lambda: lower(graph, plan, (0, 0)))
        values = [n for n, d in plan.decisions.items() if d.kind == "op"] + [c.name for c in plan.conversions]
        drawn = frozenset(np.random.default_rng(0).choice(values, int(SHARE * len(values)), replace=False).tolist())
        timed("lower with 60 % recomputed", lambda: lower(graph, plan.recomputing(drawn), (0, 0)))
        other = timed("trace the new length", lambda: request.trace(model, batch(1024)))
        again = timed("plan the new length", lambda: plan_again(other, request, plan))
        timed("lower the new length", lambda: lower(other, again, (0, 0)))
    taken["a new length in all"] = [
        sum(t) for t in zip(*(t for what, t in taken.items() if "new length" in what), strict=True)
    ]
    print("| CPU seconds | median | least | most |\n|---|---|---|---|")
    for what, seconds in taken.items():
        print(f"| {what} | {statistics.median(seconds):.2f} | {min(seconds):.2f} | {max(seconds):.2f} |")
    median = {what: statistics.median(seconds) for what, seconds in taken.items()}
    ratio = median["lower with 60 % recomputed"] / median["lower"]
    print(f"\nwith 60 % recomputed lowering takes {ratio:.2f} times as long")
    if median["lower"] > LOWERING_S or median["a new length in all"] > NEW_LENGTH_S or ratio > TIMES_AS_LONG:
        sys.exit("over the bar")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    main()

"""CPU seconds to lower LLaMA-8B's shape, 32 layers, for the first of 64 devices, and to go on with another sequence
length.

python -m benchmarks.lowering       medians of five; fails where lowering takes more than 15 s, or a new length more
than 3 s
"""

from __future__ import annotations

import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers

import autopar
from autopar.codegen import joint, lower
from autopar.request import Request

LOWERING_S, NEW_LENGTH_S, TIMES = 15.0, 3.0, 5


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
        plan = timed("plan", lambda: request.plan(graph))
        timed("lower", lambda: lower(graph, plan, (0, 0)))
        other = timed("trace the new length", lambda: request.trace(model, batch(1024)))
        again = timed("plan the new length", lambda: request.plan_again(other, plan))
        timed("lower the new length", lambda: lower(other, again, (0, 0)))
    taken["a new length in all"] = [
        sum(t) for t in zip(*(t for what, t in taken.items() if "new length" in what), strict=True)
    ]
    print("| CPU seconds | median | least | most |\n|---|---|---|---|")
    for what, seconds in taken.items():
        print(f"| {what} | {statistics.median(seconds):.2f} | {min(seconds):.2f} | {max(seconds):.2f} |")
    if statistics.median(taken["lower"]) > LOWERING_S or statistics.median(taken["a new length in all"]) > NEW_LENGTH_S:
        sys.exit("over the bar")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    main()

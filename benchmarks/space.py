"""CPU seconds of the space of a 32-layer LLaMA: every legal strategy of every op, every conversion, priced.

python benchmarks/space.py
"""

from __future__ import annotations

import logging
import sys
import time
import warnings

import torch
import transformers

from autopar import Cluster, DeviceMesh
from autopar.space.setting import Setting
from autopar.space.shardings import shardings
from autopar.tracer import Assume, ColoTracer

BARS = {(8, 8): 3.0, (4, 4, 4): 8.0}  # CPU seconds of all threads, on two cores


def main() -> None:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=8)).train()
        ids = torch.zeros(16, 2048, dtype=torch.long)
    graph = ColoTracer().trace(model, {"input_ids": ids, "labels": ids.clone()}, assume=Assume(no_padding=True))
    print(
        f"torch {torch.__version__}; LLaMA-7B shape with 8 key-value heads, 32 layers, batch 16, sequence 2048; "
        "median of 5\n"
    )
    print(
        "| mesh | CPU seconds | bar | sites | choices | edges | tables of sites | tables of edges "
        "|\n|---|---|---|---|---|---|---|---|"
    )
    late = []
    for shape, bar in BARS.items():
        seconds = []
        for _ in range(5):
            start = time.process_time()
            space = shardings(graph, Setting(DeviceMesh(shape), Cluster.of("h100-8x8")))
            seconds.append(time.process_time() - start)
        middle = sorted(seconds)[2]
        print(
            f"| {shape} | {middle:.2f} ({min(seconds):.2f} to {max(seconds):.2f}) | {bar} | {len(space.sites)} | "
            f"{sum(len(s.choices) for s in space.sites)} | {len(space.edges)} "
            f"| {len({id(s.choices) for s in space.sites})} | {len({id(e.seconds) for e in space.edges})} |",
            flush=True,
        )
        late += [shape] if middle > bar else []
    if late:
        sys.exit(f"over the bar: {late}")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    main()

"""CPU seconds of capture with canonicalisation, beside torch.export and make_fx, on models without weights.

    python benchmarks/capture.py [rounds]

All three run in one process, interleaved, after one warm-up each; seconds are of all threads (process_time). Peak
memory is of a process that captures and does nothing else.
"""

from __future__ import annotations

import logging
import platform
import resource
import statistics
import subprocess
import sys
import time
import warnings

import torch
import transformers
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.tracer import ColoTracer

MODELS = {
    "GPT-2, 12 layers": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False)),
    "LLaMA-7B shape, 32 layers": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(use_cache=False)),
}


def model_and_batch(name: str):
    with torch.device("meta"):
        ids = torch.zeros(2, 1024, dtype=torch.long)
        return MODELS[name]().train(), {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


def autopar(model, batch) -> int:
    return len(list(ColoTracer().trace(model, batch).nodes))


def export(model, batch) -> int:
    return len(torch.export.export(model, (), batch, strict=False).graph.nodes)


def by_make_fx(model, batch) -> int:
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())

    def step(parameters, buffers, batch):
        return torch.func.functional_call(model, {**parameters, **buffers}, (), batch, tie_weights=True).loss

    return len(
        make_fx(step, tracing_mode="fake", pre_dispatch=True, _allow_non_fake_inputs=True)(
            parameters, buffers, batch
        ).graph.nodes
    )


ROUTES = {"autopar": autopar, "torch.export": export, "make_fx": by_make_fx}


BAR = 0.25  # of torch.export's seconds


def _peak_of(name: str) -> str:
    """Memory of a process of its own that captures the model."""
    command = [sys.executable, __file__, "--memory", name]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main(rounds: int) -> None:
    worst = 0.0
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}, "
        f"{torch.get_num_threads()} threads; batch 2, sequence 1024; median of {rounds} (least to most)\n"
    )
    print(f"| {'model':26} | {'route':12} | {'nodes':>5} | CPU seconds         | of torch.export |")
    print("|---|---|---|---|---|")
    for name in MODELS:
        model, batch = model_and_batch(name)
        seconds: dict[str, list[float]] = {route: [] for route in ROUTES}
        nodes = {}
        for round_ in range(rounds + 1):
            for route, capture in ROUTES.items():
                start = time.process_time()
                try:
                    nodes[route] = capture(model, batch)
                except Exception as e:  # a route that cannot says so
                    nodes[route] = type(e).__name__
                if round_:
                    seconds[route].append(time.process_time() - start)
        middle = {route: statistics.median(s) for route, s in seconds.items()}
        worst = max(worst, middle["autopar"] / middle["torch.export"])
        for route, s in seconds.items():
            print(
                f"| {name:26} | {route:12} | {nodes[route]!s:>5} | {middle[route]:.2f} ({min(s):.2f} to "
                f"{max(s):.2f}) | {middle[route] / middle['torch.export']:.2f} |",
                flush=True,
            )
    for name in MODELS:
        print(f"\npeak memory of capturing {name}: {_peak_of(name)}", end="")
    print()
    if worst > BAR:
        sys.exit(f"capture takes {worst:.2f} of torch.export's time: the bar is {BAR}")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    if sys.argv[1:2] == ["--memory"]:
        autopar(*model_and_batch(sys.argv[2]))
        print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB, imports included")
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 7)

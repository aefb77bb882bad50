"""Predicted seconds and bytes of training steps on one GPU beside measured ones.

    python -m benchmarks.gpu measure FILE    on a machine with a GPU: calibrates, runs the steps, writes FILE
    python -m benchmarks.gpu report FILE     anywhere: plans the same steps on the profile in FILE, writes gpu.md

Every figure of a prediction comes from micro-benchmarks of the machine (`autopar calibrate`), or, in the column beside,
from the file of its device class.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import logging
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

import autopar
from autopar import Cluster, DeviceMesh, Precision
from autopar.calibrate.calibration import calibrate
from autopar.calibrate.stages import Stages
from autopar.runtime.world import start_world

HERE = Path(__file__).parent
DEVICE = "cuda"
WIDTH, WORDS = 4096, 128256  # of a head
WARM, STEPS, LOOPS = 3, 5, 5
MOST_KERNELS = 60  # of a step that are kept by their seconds
WAITS = 0.95  # of a step, in a loop or alone: where its host takes so much of it, the device waited
MOST = 0.07  # of a measured step: the largest error that is asked for
HALVES = {"precision": Precision("bfloat16", "float32")}
Made = tuple[Callable[[], torch.nn.Module], Callable[[], dict[str, torch.Tensor]]]


@dataclass(frozen=True)
class Step:
    """A model, its batch, and how they are planned."""

    made: Made
    how: dict[str, Any] = field(default_factory=lambda: dict(HALVES))
    compile: bool = False


def text(vocabulary: int, batch: int, length: int) -> Callable[[], dict[str, torch.Tensor]]:
    def draw() -> dict[str, torch.Tensor]:
        ids = torch.randint(0, vocabulary, (batch, length))
        return {"input_ids": ids, "labels": ids.clone()}

    return draw


def pictures(batch: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(batch, 3, 224, 224), "labels": torch.randint(0, 1000, (batch,))}


def gpt2(batch: int) -> Made:
    config = transformers.GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    return lambda: transformers.GPT2LMHeadModel(config), text(config.vocab_size, batch, 1024)


def llama(batch: int) -> Made:
    config = transformers.LlamaConfig(
        num_hidden_layers=16,
        hidden_size=2048,
        intermediate_size=8192,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return lambda: transformers.LlamaForCausalLM(config), text(config.vocab_size, batch, 2048)


def vit(batch: int) -> Made:
    config = transformers.ViTConfig(num_labels=1000)
    return lambda: transformers.ViTForImageClassification(config), lambda: pictures(batch)


def resnet(batch: int) -> Made:
    config = transformers.ResNetConfig(num_labels=1000)
    return lambda: transformers.ResNetForImageClassification(config), lambda: pictures(batch)


OF_LLAMA = ("add_rms_norm", "rms_norm", "gated", "rotary_pair", "cross_entropy")
OF_HEAD = ("cross_entropy",)
OF_GPT2 = ("add_layer_norm", "layer_norm", "bias_gelu", "cross_entropy")
CASES = {
    "GPT-2, 16 x 1024": Step(gpt2(16)),
    "GPT-2, 16 x 1024, compiled": Step(gpt2(16), compile=True),
    "GPT-2, 8 x 1024, float32": Step(gpt2(8), {}),
    "LLaMA 1B, 4 x 2048": Step(llama(4)),
    "LLaMA 1B, 4 x 2048, compiled": Step(llama(4), compile=True),
    "LLaMA 1B, 4 x 2048, kernels": Step(llama(4), {**HALVES, "kernels": OF_LLAMA}),
    "GPT-2, 16 x 1024, kernels": Step(gpt2(16), {**HALVES, "kernels": OF_GPT2}),
    "LLaMA 1B, 8 x 2048, recompute": Step(llama(8), {**HALVES, "recompute": "full"}),
    "ViT-B, 128": Step(vit(128)),
    "ViT-B, 256": Step(vit(256)),
    "ViT-B, 256, compiled": Step(vit(256), compile=True),
    "ResNet-50, 128": Step(resnet(128)),
    "ResNet-50, 256": Step(resnet(256)),
    "ResNet-50, 256, compiled": Step(resnet(256), compile=True),
}


def asked(case: Step, cluster: Any) -> dict[str, Any]:
    """The arguments of the plan of a step."""
    return {
        "mesh": (1,),
        "cluster": cluster,
        "memory_budget": "inf",
        "assume": autopar.Assume(no_padding=True),
        "kernels": False,
        "compile": case.compile,
        **case.how,
    }


def run(case: Step) -> dict[str, Any]:
    """Seconds of a step in loops that wait at their ends, as a training loop does, and the peak of memory.

    Beside them those of steps that wait each, of the host in these, and of the device's kernels.
    """
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model, batch = case.made[0]().train(), case.made[1]()
    gc.collect()
    torch.cuda.empty_cache()
    start = time.perf_counter()
    parallel = autopar.autoparallelize(model, batch, **asked(case, "h200-1x8"))
    optimizer = torch.optim.AdamW(parallel.parameters())
    del model

    def step() -> Any:
        outputs = parallel(**batch)  # held over the step, logits and all, as a training loop has them
        outputs.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return outputs

    def timed(steps: int) -> tuple[float, float]:
        """Seconds until the host has started so many steps, and until the device has run them."""
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(steps):
            step()
        started = time.perf_counter() - begun
        torch.cuda.synchronize()
        return started, time.perf_counter() - begun

    timed(WARM)
    ready = time.perf_counter() - start
    torch.cuda.reset_peak_memory_stats()
    each = [timed(1) for _ in range(STEPS)]
    taken = [timed(STEPS)[1] / STEPS for _ in range(LOOPS)]
    peak = torch.cuda.max_memory_allocated()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    kernels = sorted(seen.key_averages(), key=lambda e: -e.self_device_time_total)
    first, middle, third = statistics.quantiles(taken, n=4)
    host, waited = (statistics.median(column) for column in zip(*each, strict=True))
    return {
        "seconds": middle,
        "spread": (third - first) / middle,
        "host_s": host,
        "waited_s": waited,
        "device_s": sum(e.self_device_time_total for e in kernels) / 1e6,
        "peak_bytes": peak,
        "ready_s": ready,
        "kernels": [[e.key[:100], e.count, e.self_device_time_total / 1e6] for e in kernels[:MOST_KERNELS]],
    }


class Head(torch.nn.Module):
    """A layer, and the head of a vocabulary with its loss."""

    def __init__(self, width: int = WIDTH, words: int = WORDS) -> None:
        super().__init__()
        self.inner, self.head = torch.nn.Linear(width, width), torch.nn.Linear(width, words, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.head(self.inner(x)).float(), labels)


def run_head(rows: int, kernels: Any, **how: Any) -> dict[str, float]:
    """Seconds of forward and backward of a head on so many rows, and the most bytes that they make beside."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        batch = {"x": torch.randn(rows, WIDTH), "labels": torch.randint(0, WORDS, (rows,))}
        model = Head()
    how = {"mesh": (1,), "cluster": "h200-1x8", "memory_budget": "inf", "kernels": kernels, **HALVES, **how}
    parallel = autopar.autoparallelize(model, batch, **how)
    del model
    taken = []
    for i in range(WARM + STEPS):
        torch.cuda.synchronize()
        before, begun = torch.cuda.memory_allocated(), time.perf_counter()
        torch.cuda.reset_peak_memory_stats()
        parallel(**batch).backward()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - begun)
        made = torch.cuda.max_memory_allocated() - before
        if i == 0:
            continue
        for p in parallel.parameters():
            p.grad.zero_()
    return {"seconds": statistics.median(taken[WARM:]), "made_bytes": made}


def _stop(*_: Any) -> None:
    raise TimeoutError("it took longer than --limit")


def measure(path: Path, without: list[str], profile: bool, limit: int) -> None:
    """Calibrate this machine, run the steps, and write what was found; a step that fails says why."""
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "steps": {}}
    start_world()
    signal.signal(signal.SIGALRM, _stop)
    if profile:
        start = time.perf_counter()
        cluster = calibrate(DeviceMesh((1,)), DEVICE, "here", repetitions=3, stages=Stages(out=io.StringIO()))
        found["calibrated_s"] = time.perf_counter() - start
        print(f"calibrated in {found['calibrated_s']:.0f} s, together {cluster.together:.3f}", flush=True)
        cluster.save(path.with_suffix(".profile.json"))
    for name, case in sorted(CASES.items(), key=lambda item: not item[1].compile):
        if any(part in name for part in without):
            continue
        signal.alarm(limit)
        try:
            found["steps"][name] = run(case)
            print(name, {k: round(v, 4) for k, v in found["steps"][name].items() if k != "kernels"}, flush=True)
        except Exception as e:
            found.setdefault("failed", {})[name] = f"{type(e).__name__}: {str(e)[:300]}"  # the others still run
            print(name, "failed:", found["failed"][name], flush=True)
            logging.getLogger("benchmarks").exception(name)
        signal.alarm(0)
        path.write_text(json.dumps(found, indent=2) + "\n")
    for rows in (8192, 32768):
        for name, kernels, chunks in (("ops", False, 1), ("kernel", OF_HEAD, 1), ("kernel, 8 chunks", OF_HEAD, 8)):
            found.setdefault("heads", {})[f"{rows} rows, {name}"] = seen = run_head(rows, kernels, chunks=chunks)
            print(
                "head",
                rows,
                name,
                f"{seen['seconds'] * 1e3:.2f} ms",
                f"{seen['made_bytes'] / 2**30:.2f} GiB",
                flush=True,
            )
    path.write_text(json.dumps(found, indent=2) + "\n")


def report(path: Path) -> int:
    """The table of predictions beside what was measured; 1 where the error of a step is above the bar.

    A step whose host takes as long as its device waits for it, which no prediction knows: it is told and not counted.
    """
    found = json.loads(path.read_text())
    profile = Cluster.of(str(path.with_suffix(".profile.json")))
    lines, errors = [], []
    for name, seen in found["steps"].items():
        with torch.device("meta"):
            model = CASES[name].made[0]().train()
        batch = CASES[name].made[1]()
        plans = [autopar.plan(model, batch, **asked(CASES[name], c)) for c in (profile, "h200-1x8")]
        ratios = [plan.step_time_s / seen["seconds"] for plan in plans]
        waits = seen["host_s"] > WAITS * min(seen["seconds"], seen["waited_s"])
        if not waits:
            errors.append(abs(ratios[0] - 1))
        lines.append(
            f"| {name} | {seen['seconds'] * 1e3:.1f} | {seen['spread']:.1%} | {seen['waited_s'] * 1e3:.1f} "
            f"| {seen['host_s'] * 1e3:.1f}{' *' * waits} | {seen['device_s'] * 1e3:.1f} "
            f"| {plans[0].step_time_s * 1e3:.1f} | {ratios[0]:.2f} | {ratios[1]:.2f} "
            f"| {seen['peak_bytes'] / 2**30:.2f} | {plans[0].peak_bytes / 2**30:.2f} |"
        )
        print(lines[-1], flush=True)
    missing = ", ".join(name for name in CASES if name not in found["steps"])
    about = (
        f"{found['device']}, torch {found['torch']}; calibrated in {found['calibrated_s']:.0f} s. "
        f"Of {len(errors)} steps that do not wait for the host (*): median error {statistics.median(errors):.1%}, "
        f"largest {max(errors):.1%}, where {MOST:.0%} are asked for. Not measured: {missing or 'nothing'}.\n\n"
        "| step | measured ms | spread | one alone | host ms | kernels ms | predicted ms | of measured | by its class "
        "| peak GiB | planned |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|"
    )
    print(about)
    path.with_suffix(".table.md").write_text("\n".join([about, *lines]) + "\n")
    return int(max(errors) > MOST)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["measure", "report"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--without", nargs="*", default=[], help="no steps whose names hold one of these")
    parser.add_argument("--limit", type=int, default=0, help="seconds of a step, with all that it takes to be ready")
    parser.add_argument("--without-profile", action="store_true")
    given = parser.parse_args()
    if given.what == "report":
        return report(given.file)
    measure(given.file, given.without, not given.without_profile, given.limit)
    return 0


if __name__ == "__main__":
    sys.exit(main())

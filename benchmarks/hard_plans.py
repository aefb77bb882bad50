"""CPU seconds and gaps of planning calls that once hung, took minutes, or ended with a bad certificate, each with its
bar.

    AUTOPAR_EXTRAS=.venv-extras python -m benchmarks.hard_plans [case ...]     each case in a process of its own; fails
    above a bar

CPU seconds are those of the process and of the integer programs that it starts: a machine that does other work beside
does not change them much. The budgets of convnext go down to one that nothing fits.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

SHARES = (0.9, 0.7, 0.6, 0.5, 0.48, 0.45, 0.3)  # of the free plan's peak
LIMIT_S = 600  # of a case, after which it is a failure

#       case: (what it is, most CPU seconds of a call, largest gap or None where it has no bar)
BARS: dict[str, tuple[str, float, float | None]] = {
    "convnext": ("convnext_tiny, 8 x 3 x 64 x 64, on (4,), at shares of its free peak", 20.0, None),
    "masks": ("13 attentions of one sequence with 13 masks, on (2, 2) with fast links", 20.0, 0.005),
    "gpt2": ("GPT-2 small, 2 layers, 8 x 128, on (2, 2)", 6.0, 0.035),
    "granite": ("Granite, 2 layers, 64 wide, 8 x 16, on (2, 2, 2)", 20.0, 0.02),
    "tight": ("Granite, SmolLM3, Pegasus, 2 layers, 64 wide, 8 x 16, on (2,), at shares of their peaks", 10.0, None),
    "rows": ("LLaMA, 2 layers, 64 wide, on (2,), under shares of its peak: 8 x 64, then other rows", 10.0, None),
    "infeasible": (
        "LLaMA-8B's shape on (8, 8): budgets that nothing fits, far under the smallest plan and near it",
        15.0,
        None,
    ),
    "explain": ("LLaMA-8B's shape on (8, 8): explain an MLP, then a layer", 2.0, None),
    "gpt3": ("GPT-3 175B's shape on (16, 8, 8) at 80 GiB", 25.0, 0.02),
}


SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}
PEGASUS = {
    "vocab_size": 256,
    "d_model": 64,
    "max_position_embeddings": 64,
    **{f"{half}_layers": 2 for half in ("encoder", "decoder")},
    **{f"{half}_attention_heads": 4 for half in ("encoder", "decoder")},
    **{f"{half}_ffn_dim": 128 for half in ("encoder", "decoder")},
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WHOLE = {"chunks": 1, "microbatches": 1}


def cpu() -> float:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def timed(what: str, call: Callable[[], Any]) -> Any:
    """Run a call and print its figures as JSON; what it returns, None where nothing fits."""
    from autopar.letters import Infeasible

    before, wall, result, said = cpu(), time.perf_counter(), None, ""
    try:
        result = call()
    except Infeasible as e:
        said = f"nothing fits: {e.seen.split(';')[0]}"
    gap, step = getattr(result, "gap", None), getattr(result, "step_time_s", None)
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        json.dumps(
            {
                "what": what,
                "cpu": cpu() - before,
                "wall": time.perf_counter() - wall,
                "gap": gap,
                "step": step,
                "rss": rss,
                "said": said,
                "stopped": list(getattr(result, "stopped", ())),
            }
        ),
        flush=True,
    )
    return result


def causal_masks() -> Any:
    """One layer whose heads attend 13 times, each time under another mask."""
    import torch

    class Attentions(torch.nn.Module):
        def __init__(self, count: int = 13, width: int = 64, heads: int = 4, length: int = 16) -> None:
            super().__init__()
            self.count, self.heads = count, heads
            self.qkv = torch.nn.Linear(width, 3 * width)
            self.out = torch.nn.Linear(width, width)
            for i in range(count):
                self.register_buffer(f"mask{i}", torch.tril(torch.ones(length, length, dtype=torch.bool), i))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            b, s, d = x.shape
            q, k, v = (t.view(b, s, self.heads, d // self.heads).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            total = sum(
                torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=getattr(self, f"mask{i}"))
                for i in range(self.count)
            )
            return self.out(total.transpose(1, 2).reshape(b, s, d)).square().mean()

    return Attentions(), (torch.zeros(8, 16, 64),)


def language_model(kind: str, config: Any, rows: int, length: int) -> Any:
    import torch
    import transformers

    with torch.device("meta"):
        model, ids = getattr(transformers, kind)(config).train(), torch.zeros(rows, length, dtype=torch.long)
    return model, {"input_ids": ids, "labels": ids.clone()}


def llama_8b() -> tuple[Any, Any, dict[str, Any]]:
    import transformers

    import autopar

    config = transformers.LlamaConfig(
        num_hidden_layers=32,
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
    )
    return *language_model("LlamaForCausalLM", config, 16, 8192), {
        "mesh": (8, 8),
        "cluster": "h100-8x8",
        "assume": autopar.Assume(no_padding=True),
        "gap": 0.005,
    }


def run(case: str) -> None:
    """One case, in this process."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    import torch
    import transformers

    import autopar
    from autopar.request import Request
    from autopar.search import plan_again, plan_of

    if case == "convnext":
        from tests.zoo.families import extras

        extras()
        import torchvision

        model, batch = torchvision.models.convnext_tiny(num_classes=8).train(), (torch.zeros(8, 3, 64, 64),)
        how: dict[str, Any] = {"mesh": (4,), "loss": lambda out, inputs: out.square().mean()}
        free = timed("free", lambda: autopar.plan(model, batch, **how))
        for share in SHARES:
            timed(
                f"{share:.0%} of the free peak",
                lambda share=share: autopar.plan(model, batch, memory_budget=int(share * free.peak_bytes), **how),
            )
    elif case == "masks":
        from tests.models import eager_links

        model, batch = causal_masks()
        timed("free", lambda: autopar.plan(model, batch, mesh=(2, 2), cluster=eager_links()))
    elif case == "gpt2":
        model, batch = language_model("GPT2LMHeadModel", transformers.GPT2Config(n_layer=2), 8, 128)
        timed("free", lambda: autopar.plan(model, batch, mesh=(2, 2)))
    elif case == "granite":
        model, batch = language_model("GraniteForCausalLM", transformers.GraniteConfig(**SMALL), 8, 16)
        timed("free", lambda: autopar.plan(model, batch, mesh=(2, 2, 2)))
    elif case == "tight":
        for kind, sizes in (("Granite", SMALL), ("SmolLM3", SMALL | TOKENS), ("Pegasus", PEGASUS)):
            config = getattr(transformers, f"{kind}Config")(**sizes)
            task = "ConditionalGeneration" if kind == "Pegasus" else "CausalLM"
            call = functools.partial(autopar.plan, *language_model(f"{kind}For{task}", config, 8, 16), mesh=(2,))
            free = timed(f"{kind}: free", call)
            for share in (0.7, 0.6, 0.5, 0.4, 0.3):
                under = functools.partial(call, memory_budget=int(share * free.peak_bytes))
                timed(f"{kind}: {share:.0%} of the free peak", under)
    elif case == "rows":
        model, batch = language_model("LlamaForCausalLM", transformers.LlamaConfig(**SMALL), 8, 64)
        free = autopar.plan(model, batch, mesh=(2,))
        for share in (0.6, 0.5):
            request = Request(mesh=(2,), memory_budget=int(share * free.peak_bytes))
            first = timed(f"8 rows, {share:.0%} of the free peak", lambda r=request: plan_of(r.trace(model, batch), r))
            for rows in (6, 10, 16, 32):
                graph = request.trace(model, language_model("LlamaForCausalLM", model.config, rows, 64)[1])
                timed(f"then {rows}", lambda g=graph, r=request, f=first: plan_again(g, r, f))
    elif case == "infeasible":
        model, batch, how = llama_8b()
        timed("1 GiB", lambda: autopar.plan(model, batch, memory_budget=1 << 30, **how))
        timed("3 GiB", lambda: autopar.plan(model, batch, memory_budget=3 << 30, **how))
        timed(
            "0.1 % under the smallest that recomputes nothing",
            lambda: autopar.plan(model, batch, memory_budget=30_459_031_894, recompute="none", **WHOLE, **how),
        )
    elif case == "explain":
        model, batch, how = llama_8b()
        plan = autopar.plan(model, batch, **how)
        timed("model.layers.3.mlp", lambda: plan.explain("model.layers.3.mlp"))
        timed("model.layers.7", lambda: plan.explain("model.layers.7"))
    else:
        model, batch = language_model(
            "GPT2LMHeadModel", transformers.GPT2Config(n_layer=96, n_embd=12288, n_head=96, n_positions=2048), 64, 2048
        )
        timed(
            "80 GiB",
            lambda: autopar.plan(
                model, batch, mesh=(16, 8, 8), cluster="h100-8x128", memory_budget=80 * 2**30, gap=0.005
            ),
        )


def main(cases: list[str]) -> None:
    import torch

    print(
        f"torch {torch.__version__}; default cluster where none is named; weights on meta but for convnext's and "
        "the masks'\n"
    )
    print(
        "| case | call | CPU s | bar | wall s | step | gap | bar | peak of the process | "
        "|\n|---|---|---|---|---|---|---|---|---|---|"
    )
    late = []
    for case in cases:
        title, most, widest = BARS[case]
        try:
            said = subprocess.run(
                [sys.executable, "-m", "benchmarks.hard_plans", "--here", case],
                check=True,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            ).stdout
        except subprocess.TimeoutExpired:
            late.append((case, f"no end in {LIMIT_S} s"))
            continue
        except subprocess.CalledProcessError as e:
            late.append((case, e.stderr[-400:]))
            continue
        for r in map(json.loads, filter(lambda line: line.startswith("{"), said.splitlines())):
            remark = r["said"] or (f"stopped: {', '.join(r['stopped'])}" if r["stopped"] else "")
            step, gap = ("-", "-") if r["step"] is None else (f"{r['step'] * 1e3:.3f} ms", f"{r['gap']:.2%}")
            print(
                f"| {title} | {r['what']} | {r['cpu']:.1f} | {most:g} | {r['wall']:.1f} | {step} | {gap} | "
                f"{'-' if widest is None else f'{widest:.1%}'} | {r['rss'] / 2**30:.2f} GiB | {remark} |",
                flush=True,
            )
            if r["cpu"] > most or (widest is not None and r["gap"] is not None and r["gap"] > widest):
                late.append((case, r["what"]))
            if case == "infeasible" and not r["said"]:
                late.append((case, "a plan where nothing fits"))
    if late:
        sys.exit(f"over the bar: {late}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--here"]:
        run(sys.argv[2])
    else:
        main(sys.argv[1:] or list(BARS))

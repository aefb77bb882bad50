"""Programs that are made once: the start of a rank that reads them, a second start, and tokens from two of them.

    PYTHONPATH=. python -m benchmarks.programs                     # all; each prints a table
    PYTHONPATH=. python -m benchmarks.programs start | again | decode

start     LLaMA-8B on (8, 8): CPU seconds of a rank that does all by itself, and of one that reads; bytes of the file
again     a script on four gloo ranks, started twice over one folder: what each rank does
decode    CPU ms a token of `generate` on four gloo ranks, beside a bare loop over the same two programs, in turn
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pickle
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers as hf
from torch import Tensor

import autopar
import autopar.api
from autopar.codegen import joint, lower
from autopar.codegen.records import Records, packed, unpacked
from autopar.graph.graph import Graph
from autopar.module.attributes import reads_of
from autopar.module.likeness import likeness_of, said_of
from autopar.sharding.cluster import Link
from autopar.sharding.device import Device
from autopar.testing import on_processes
from autopar.tracer import ColoTracer

# Figures of a measured profile of four processes on two cores, rounded: what they measure varies by half.
PROCESSES = replace(
    autopar.Cluster.of("h100-8x1"),
    name="four processes",
    device=Device("a process", (("float32", 2e10),), 2**32, 6e9, 2e-5, kernels="cpu"),
    links=(Link("gloo", 1e-3, 2.5e8),),
    devices_per_node=4,
)
ROWS, PROMPT, NEW, ROUNDS = 4, 32, 24, 17
LAYERS = 32


def llama_8b() -> hf.LlamaForCausalLM:
    config = hf.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=LAYERS,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    with torch.device("meta"):
        return hf.LlamaForCausalLM(config)


def start() -> None:
    model = llama_8b()
    batch = {k: torch.empty(64, 4096, dtype=torch.long, device="meta") for k in ("input_ids", "labels")}
    plan = autopar.plan(model, batch, mesh=(8, 8), cluster="h100-8x8", precision="bf16")
    request = plan.origin.request
    sent_plan = pickle.dumps(plan)
    took: dict[str, float] = {}

    def timed(name: str, does: Callable[[], Any]) -> Any:
        begun = time.process_time()
        made = does()
        took[name] = time.process_time() - begun
        return made

    with reads_of(model) as reads:
        graph = timed("alone: trace", lambda: request.trace(model, batch))
    given = timed("alone: the plan arrives", lambda: pickle.loads(sent_plan))
    here = plan.mesh.coordinate(1)
    timed("alone: lower and certify", lambda: lower(request.as_planned(graph, given), given, here))
    records = Records()
    lower(request.as_planned(graph, given), given, plan.mesh.coordinate(0), records=records)
    text, halves = graph.to_json(), packed(records.data())
    joint.LOWERED.clear()
    timed("reads: likeness", lambda: (likeness_of(model, batch), said_of(model, reads)))
    graph = timed("reads: graph", lambda: Graph.from_json(text))
    given = timed("reads: plan", lambda: pickle.loads(sent_plan))
    known = Records(timed("reads: halves", lambda: unpacked(halves)), left_open="")
    timed("reads: lower", lambda: lower(request.as_planned(graph, given), given, here, records=known))
    assert not known.lowered
    alone, reads_s = (sum(s for name, s in took.items() if name.startswith(way)) for way in ("alone", "reads"))
    with tempfile.TemporaryDirectory() as folder:
        size = os.path.getsize(plan.compile(f"{folder}/llama.autopar", device="cpu"))
    print("| stage | CPU s |\n|---|---|")
    print("\n".join(f"| {name} | {seconds:.2f} |" for name, seconds in took.items()))
    print(
        f"\nalone {alone:.2f} s, reads {reads_s:.2f} s: {reads_s / alone:.2f}; halves {len(halves)} bytes on the wire, "
    )
    print(f"file {size / 1e6:.2f} MB\n")


def small(**sizes: Any) -> hf.LlamaForCausalLM:
    torch.manual_seed(0)
    config = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**config | heads | sizes)).eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model


def prompts() -> Tensor:
    return torch.randint(0, 2048, (ROWS, PROMPT), generator=torch.Generator().manual_seed(1))


def script(rank: int, folder: str) -> dict[str, int]:
    """How often this rank traces, searches and lowers in a start with training, evaluation and generation."""
    logging.disable(logging.WARNING)
    done: dict[str, int] = {}

    def counted(does: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
        done[name] = done.get(name, 0) + 1
        return does(*args, **kwargs)

    homes = ((ColoTracer, "trace"), (autopar.api, "plan_of"), (autopar.api, "plan_again"), (joint, "_lower"))
    for home, name in homes:
        does = functools.partial(counted, getattr(home, name), name)
        setattr(home, name, lambda *args, does=does, **kwargs: does(*args, **kwargs))
    ids = prompts()
    model = autopar.autoparallelize(
        small().train(), {"input_ids": ids, "labels": ids}, mesh=(2, 2), parallel="megatron", cache=folder
    )
    model(input_ids=ids, labels=ids).loss.backward()
    with torch.no_grad():
        model.eval()(input_ids=ids, labels=ids)
    model.generate(ids, max_new_tokens=4, do_sample=False)
    return done


def again() -> None:
    print("| start | rank 0 | ranks 1 to 3 |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in ("first", "second"):
            first, *others = on_processes(4, script, folder, timeout_s=400)
            assert all(other == others[0] for other in others)
            print(f"| {name} | {first or 'nothing'} | {others[0] or 'nothing'} |", flush=True)
    print()


@contextlib.contextmanager
def marks_of(cls: Any) -> Iterator[list[float]]:
    """CPU seconds at each token that a model of this class generates inside the block."""
    name = "_update_model_kwargs_for_generation"
    does = getattr(cls, name)
    marks: list[float] = []

    def noted(*args: Any, **kwargs: Any) -> Any:
        marks.append(time.process_time())
        return does(*args, **kwargs)

    with mock.patch.object(cls, name, noted):
        yield marks


class Bare:
    """A loop over the programs of a prompt and of a token, and nothing else."""

    def __init__(self, model: Any) -> None:
        self.programs = model._own.programs[-2:]
        self.weights = [
            [*(p.to_local() for p in of.parameters.tensors(model)), *of.buffers.tensors(model)] for of in self.programs
        ]
        self.most = PROMPT + NEW - 1

    def run(self) -> tuple[Tensor, float]:
        """The tokens, and CPU seconds of one."""
        ids = current = prompts()
        carried: dict[str, Tensor] = {}
        marks = []
        for length in (0, *range(PROMPT, self.most)):
            current, carried = self._call(length > 0, current, length, carried)
            ids = torch.cat([ids, current], 1)
            marks.append(time.process_time())
        return ids, (marks[-1] - marks[3]) / (len(marks) - 4)

    def _call(
        self, decodes: bool, current: Tensor, length: int, carried: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        runner = self.programs[decodes].runner
        count = current.shape[1]
        given = {**carried, "input_ids": current, "cache.length": torch.tensor(length)}
        given["position_ids"] = (torch.arange(count) + length).expand(ROWS, count).contiguous()
        if decodes:
            given["attention_mask"] = (torch.arange(self.most) <= length).expand(ROWS, 1, 1, -1).contiguous()
        outputs = runner.halves.forward(*(given[name] for name in runner.graph.inputs), *self.weights[decodes])
        named = dict(zip(runner.graph.output_names, outputs, strict=False))
        left = {name: x for name, x in named.items() if name.startswith("cache.")}
        return named["logits"][:, -1:].argmax(-1), left


def decoded(rank: int, is_generic: bool) -> tuple[list[tuple[float, ...]], int]:
    """CPU seconds a token of each round: the bare loop, `generate`, and one device; and collectives of a token."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    ids = prompts()
    batch = {"input_ids": ids, "labels": ids}
    cluster = None if is_generic else PROCESSES
    alone = small()
    model = autopar.autoparallelize(small().train(), batch, mesh=(2, 2), parallel="megatron", cluster=cluster).eval()
    due = alone.generate(ids, max_new_tokens=NEW, do_sample=False)
    model.generate(ids, max_new_tokens=NEW, do_sample=False)
    bare = Bare(model)
    rounds = []
    with torch.no_grad():
        for _ in range(ROUNDS):
            dist.barrier()
            tokens, bare_s = bare.run()
            assert torch.equal(tokens, due)
            taken = []
            for of, how in ((model, {}), (alone, {"cache_implementation": "static"})):
                dist.barrier()
                with marks_of(type(of)) as marks:
                    tokens = of.generate(ids, max_new_tokens=NEW, do_sample=False, **how)
                assert torch.equal(tokens, due)
                taken.append((marks[-1] - marks[3]) / (len(marks) - 4))
            rounds.append((bare_s, *taken))
    return rounds[2:], len(model._own.programs[-1].lowered.collectives)


def decode() -> None:
    print("| cluster | collectives a token | bare loop | generate | one device | generate / bare loop |")
    print("|---|---|---|---|---|---|")
    for is_generic in (False, True):
        by_rank = on_processes(4, decoded, is_generic, timeout_s=600)
        # of all ranks: which of them waits for the others changes from round to round
        rounds = [
            [1e3 * sum(of) / 4 for of in zip(*ranks, strict=True)]
            for ranks in zip(*(r for r, _ in by_rank), strict=True)
        ]
        medians = " | ".join(f"{statistics.median(of):.2f}" for of in zip(*rounds, strict=True))
        ratios = sorted(generate / bare for bare, generate, _ in rounds)
        said = f"{statistics.median(ratios):.2f} ({ratios[1]:.2f} to {ratios[-2]:.2f})"
        name = "generic" if is_generic else PROCESSES.name
        print(f"| {name} | {by_rank[0][1]} | {medians} | {said} |", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for _name in sys.argv[1:] or ("start", "again", "decode"):
        {"start": start, "again": again, "decode": decode}[_name]()

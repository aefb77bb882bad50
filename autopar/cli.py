"""The command line. `autopar COMMAND --help` says what each takes.

    autopar plan llama-3-8b --mesh 8x8 --cluster h100-8x8 --inputs batch=64,seq=8192 --precision bf16 --out plan.json
    autopar compile train.py:build --mesh 8 -o model.autopar                 the programs of its ranks, in one file
    autopar fit llama-3-8b --inputs batch=64,seq=8192 --precision bf16       on how many devices of which kind
    autopar fit llama-3-8b --inputs batch=512,seq=8192 --precision bf16 --tokens 1T --days 30 --price 2.5
    autopar show plan.json                                                   a plan at one look; --table: all of it
    autopar explain plan.json "model.layers.*.mlp.up_proj"                   one place of it
    autopar report plan.json -o plan.html                                    a page about it; plan --report has more
    autopar diff plan.json other.json                                        what two plans decide otherwise
    autopar timeline gpt2 --inputs batch=8,seq=256 --mesh 4 -o step.json     the step as a trace, and a measured one
    autopar export plan.json --to fsdp2                                      for other systems, and what they lack
    autopar verify plan.json train.py:build                                  its program on ranks beside one device
    autopar run --ranks 8 train.py                                           a script on local ranks
    autopar check                                                            versions, solvers, backends, GPUs
    autopar check llama-3-8b 8 --cluster h100-8x1 --precision bf16           the memory of a step on a mesh, by kind
    autopar calibrate --ranks 4 --mesh 2,2 -o profile.json                   measure this machine
    autopar bench kernels                                                    time kernels beside their ops

A command exits with 0; with 1 where the answer is no, or after a letter, which goes to the standard error; with 2 where
the command line cannot be read.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Sequence

from autopar import __version__
from autopar.letters import BadCluster, BadSharding, Letter, NotServed

_INTERRUPTED = 130
_HOME = {  # command -> the module that runs it, imported when it is asked for
    "plan": "planning",
    "compile": "compiling",
    "fit": "fit",
    "show": "plans",
    "explain": "plans",
    "diff": "plans",
    "timeline": "timing",
    "export": "exporting",
    "report": "plans",
    "verify": "verifying",
    "run": "launching",
    "check": "machines",
    "calibrate": "calibrating",
    "bench": "machines",
}


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _parser().parse_args(arguments)
    try:
        _check(asked)
        logging.basicConfig(format="autopar: %(message)s", stream=sys.stderr)
        logging.getLogger("autopar").setLevel(logging.WARNING if asked.quiet else logging.INFO)
        warnings.filterwarnings("ignore", module="(pulp|transformers|torch).*")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # Ranks that are started inherit it.
        command = getattr(importlib.import_module(f"autopar.commands.{_HOME[asked.command]}"), asked.command)
        return int(command(asked))
    except Letter as e:
        print(e, file=sys.stderr)
        return 1
    except OSError as e:
        print(f"{e.filename or asked.command}: {e.strerror or e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("autopar: interrupted; nothing was written", file=sys.stderr)
        return _INTERRUPTED


def _check(asked: argparse.Namespace) -> None:
    """Raise a letter about arguments that can be seen to be wrong before anything is imported."""
    if getattr(asked, "budgets", 0) and not asked.report:
        raise NotServed(f"--budgets {asked.budgets} is of the page about a plan", advice="--report plan.html beside it")
    ranks = getattr(asked, "ranks", None)
    if ranks is not None and ranks < 1:
        raise BadSharding(f"--ranks {ranks} is not a number of ranks")
    for name in ("out", "report"):
        path = getattr(asked, name, "")
        if path and os.path.realpath(path) == os.path.realpath(getattr(asked, "plan", "")):
            raise BadCluster(f"{path} is the plan itself, and would be written over", advice="-o, with another name")
        if path and not os.path.isdir(os.path.dirname(path) or "."):
            raise BadCluster(f"the folder of {path} does not exist")


# -- what each command takes


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="autopar",
        description="An automatic-parallelism compiler for PyTorch.",
        epilog=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"autopar {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print JSON")
    common.add_argument("--quiet", action="store_true", help="say nothing of progress")

    def command(name: str, said: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=said, description=said[0].upper() + said[1:] + ".", parents=[common])

    _of_plan(command("plan", "plan a training step of a model"))
    _of_compile(command("compile", "plan a training step, lower it for all ranks, and write their programs"))
    _of_timeline(command("timeline", "write the predicted step of a plan as a trace, for Perfetto"))
    _of_fit(command("fit", "say how many devices of each kind hold a training step, or train so many tokens in time"))
    show = command("show", "print a plan that was saved")
    show.add_argument("plan", help="a file that plan.save or --out wrote")
    show.add_argument("--table", action="store_true", help="all of it")
    explain = command("explain", "say what was decided at one place of a plan")
    explain.add_argument("plan", help="a plan that was saved")
    explain.add_argument("place", help='a name as the table prints it: "model.layers.*.mlp.up_proj"')
    report = command("report", "write a page about a plan that was saved: one file, for a browser")
    report.add_argument("plan", help="a plan that was saved")
    report.add_argument("-o", "--out", default="plan.html", help="where the page goes")
    diff = command("diff", "say what two plans decide otherwise; exits with 1 where they differ")
    diff.add_argument("plan", help="a plan that was saved")
    diff.add_argument("other", help="another")
    export = command("export", "write a plan for another system, and list what that cannot be told")
    export.add_argument("plan", help="a plan that was saved")
    export.add_argument(
        "--to", required=True, choices=("fsdp2", "hf", "torchtitan", "torchtitan-toml"), help="the system"
    )
    where = "where it goes: fsdp2.py, tp_plan.json, titan_plan.py or titan.toml"
    export.add_argument("-o", "--out", default="", help=where)
    _of_verify(command("verify", "run a plan's program on local ranks, and hold it against one device"))
    _of_run(command("run", "start a script on ranks, by torchrun"))
    _of_check(command("check", "say what this machine has, or what a step of a model holds on a mesh, and if it fits"))
    _of_calibrate(command("calibrate", "measure devices and links while all ranks run, and write a profile"))
    bench = command("bench", "time kernels beside the ops that they stand for, and keep which are faster")
    bench.add_argument("arguments", nargs=argparse.REMAINDER, help="as of python -m autopar.bench: kernels --small")
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="file.py:build, which returns a model or (model, inputs); a configuration such as gpt2 or llama-3-8b; or "
        "the path of a Hugging Face config.json",
    )
    parser.add_argument(
        "--inputs",
        default="",
        help="batch=8,seq=512 (which is the default), plan: batch=auto; of a file.py: x=8x512,labels=8:int64",
    )


def _add_planning(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument("--mesh", help="2x4; or a count, whose meshes are searched; default: all of the cluster")
    parser.add_argument("--cluster", help="h100-8x4: four nodes of eight; or the path of a profile")
    _add_fabric(parser)
    parser.add_argument("--budget", help="memory of a device: 40GiB; default: the device's, less a tenth")
    parser.add_argument("--host-budget", help="memory of the host where activations of a device may wait: 64GiB")
    parser.add_argument("--precision", help="bf16 or fp16: of compute; default: the model's own")
    parser.add_argument(
        "--optimizer",
        help="adamw, sgd, sgd-momentum, autopar-adamw, autopar-adamw-during-backward, or bytes of states for each "
        "parameter",
    )
    parser.add_argument(
        "--parallel",
        help="a preset: ddp, fsdp, tp, dp, zero1 to zero3, hsdp, hsdp-zero1 and 2, megatron, dtensor, 2d, 2.5d, 3d",
    )
    parser.add_argument("--recompute", help="auto, none, full, selective, 'as written', chen, rotor, ilp")
    parser.add_argument("--accumulation", type=int, help="calls in a step")
    parser.add_argument("--microbatches", help="micro-batches of a call: a number, or auto")
    parser.add_argument("--pipeline", help="stages of the model on devices of their own: a number, or auto")
    parser.add_argument("--chunks", help="in which the loss head runs: a number, or auto")
    parser.add_argument("--constrain", action="append", metavar="NAME=SHARDING", help='"lm_head.weight=S(0)@1"; again')
    parser.add_argument("--compile", action="store_true", help="seconds of code that torch.compile makes")
    parser.add_argument("--strict", action="store_true", help="an op without a rule is an error")
    parser.add_argument("--no-padding", action="store_true", help="sequences have no padding, whatever masks say")


def _add_fabric(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--fabric",
        metavar="400G",
        help="Gbit/s of each device between nodes, in place of the cluster's: reached to the share that its own is",
    )


def _of_plan(parser: argparse.ArgumentParser) -> None:
    _add_planning(parser)
    parser.add_argument("--beside", action="store_true", help="plan ddp, fsdp and megatron beside it")
    parser.add_argument("--table", action="store_true", help="print all of the plan")
    parser.add_argument("--verbose", action="store_true", help="with stages, what each coordinate runs over time")
    parser.add_argument("--out", default="", help="where the plan goes: plan.json")
    parser.add_argument("--report", default="", help="where a page about it goes: plan.html")
    parser.add_argument("--budgets", type=int, default=0, help="how many budgets the page holds against the step time")


def _of_compile(parser: argparse.ArgumentParser) -> None:
    _add_planning(parser)
    parser.add_argument("-o", "--out", default="model.autopar", help="where the program goes")
    parser.add_argument("--rows", action="store_true", help='each rank passes its own rows: inputs="local"')
    parser.add_argument("--device", default="", help="cpu or cuda, which this machine has to have; default: its own")


def _of_timeline(parser: argparse.ArgumentParser) -> None:
    _add_planning(parser)
    parser.add_argument("-o", "--out", default="step.json", help="where the trace goes")
    parser.add_argument("--measure", action="store_true", help="run the step on local ranks, and put it beside")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that the ranks may take")


def _of_fit(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument("--clusters", default="l4,rtx4090,a100,h100,h200", help="kinds of devices, by commas")
    parser.add_argument("--budget", help="memory of a device: 40GiB; default: each kind's own, less a tenth")
    parser.add_argument("--host-budget", help="as of plan")
    parser.add_argument("--precision", help="bf16 or fp16: of compute; default: the model's own")
    parser.add_argument(
        "--optimizer", default="adamw", help="adamw, sgd, sgd-momentum, autopar-adamw, or bytes for each parameter"
    )
    parser.add_argument("--accumulation", type=int, default=1, help="calls in a step")
    parser.add_argument("--compile", action="store_true", help="seconds of code that torch.compile makes")
    _add_fabric(parser)
    parser.add_argument("--tokens", help="what is to be trained: 1T, 300B, 1e12; of images: their number")
    parser.add_argument("--days", type=float, help="that training may take; default: as the fewest devices take")
    parser.add_argument("--price", type=float, help="of a device for an hour: what training costs is said too")


def _of_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", help="as of plan; without it, this machine is looked at")
    parser.add_argument("mesh", metavar="MESH", nargs="?", help="8, or 8x4: rows are cut by the first axis")
    parser.add_argument("--inputs", default="", help="as of plan")
    parser.add_argument("--cluster", help="h100-8x4, or the path of a profile")
    _add_fabric(parser)
    parser.add_argument("--budget", help="memory of a device: 40GiB; default: the device's, less a tenth")
    parser.add_argument("--precision", help="bf16 or fp16: of compute; default: the model's own")
    parser.add_argument("--optimizer", default="adamw", help="as of plan")
    parser.add_argument("--parallel", help="a preset; default: fsdp, on a second axis megatron")
    parser.add_argument("--microbatches", type=int, default=1, help="of a call")


def _of_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", help="a plan that was saved")
    _add_model(parser)
    parser.add_argument("--near", type=float, help="the error that is allowed, as a share of a tensor's norm")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds")


def _of_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, help="of this node; default: its GPUs, or two")
    parser.add_argument("--nodes", type=int, default=1, help="of the job")
    parser.add_argument("--endpoint", default="localhost:29500", help="host and port of the first node")
    parser.add_argument("--max-restarts", type=int, default=0, help="how often all ranks start again after one failed")
    parser.add_argument(
        "--log-dir", default="", help="where each rank's output goes; the terminal has that of the first"
    )
    parser.add_argument("script", help="train.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")


def _of_calibrate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks",
        type=int,
        help="start so many local processes; without it, be a rank of the job (torchrun), or a world of one",
    )
    parser.add_argument(
        "--mesh", help="the shape whose axes are measured, as 2,4; the world on one axis where it is left out"
    )
    parser.add_argument(
        "--pairs",
        action="store_true",
        help="measure every pair of ranks too, and print the mesh that has the fastest links innermost",
    )
    parser.add_argument("--largest", type=int, default=2**24, help="bytes of the largest message")
    parser.add_argument(
        "--without-ops",
        action="store_true",
        help="leave out the tables of ops and optimizers, which take a minute or two: ops are then priced by the "
        "device's rates",
    )
    parser.add_argument(
        "--into", default="", help="a cluster, by name or path, into which what is measured is put: h100-8x4"
    )
    parser.add_argument("-o", "--out", default="profile.json", help="where the profile goes")

"""`autopar export --to fsdp2`: a Python file on torch's own fully_shard, parallelize_module and checkpoint_wrapper."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.commands.exports.exported import KINDS, Exported, Unsaid, Written
from autopar.commands.exports.remaking import Remade

_SELECTIVE = '''
ATEN = torch.ops.aten
RESULTS = {
    ATEN.mm.default: "product",
    ATEN.addmm.default: "product",
    ATEN.bmm.default: "product",
    ATEN.baddbmm.default: "product",
    ATEN.convolution.default: "convolution",
    ATEN._scaled_dot_product_flash_attention.default: "attention",
    ATEN._scaled_dot_product_flash_attention_for_cpu.default: "attention",
    ATEN._scaled_dot_product_efficient_attention.default: "attention",
    ATEN._scaled_dot_product_cudnn_attention.default: "attention",
    ATEN._scaled_dot_product_fused_attention_overrideable.default: "attention",
}


def saving(saved):
    """Contexts of a checkpoint that save the results which `saved` numbers as they run; all else is made again."""
    run = Counter()

    def policy(context, op, *args, **kwargs):
        kind = RESULTS.get(op), context.is_recompute
        number = run[kind]
        run[kind] += 1
        return CheckpointPolicy.MUST_SAVE if (kind[0], number) in saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)

'''


def fsdp2(told: Exported) -> Written:
    """A Python file with `parallelize(model)`."""
    told.refuse_stages("fully_shard")
    again = Remade.of(told.plan)
    remade = again.patterns(told.plan)
    is_selective = any(remade.values())
    policy = ""
    if told.plan.precision is not None:
        param, reduce = told.plan.precision
        policy = f"    precision = dict(mp_policy=MixedPrecisionPolicy(torch.{param}, torch.{reduce}))"
    more = ", **precision" if policy else ""
    lines = [
        '"""Written by `autopar export --to fsdp2`: the nearest to a plan that torch\'s own modules can be told."""',
        "",
        *(["from collections import Counter"] if is_selective else []),
        *(["from functools import partial"] if is_selective else []),
        "from re import fullmatch",
        "",
        *(["import torch"] if policy or is_selective else []),
        *([_CHECKPOINT] if remade else []),
        "from torch.distributed.device_mesh import init_device_mesh",
        f"from torch.distributed.fsdp import {'MixedPrecisionPolicy, ' if policy else ''}fully_shard",
        "from torch.distributed.tensor import Replicate",
        "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module",
        *(["from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts"] * is_selective),
        "",
        f"SHAPE = {tuple(told.degree(kind) for kind in KINDS)}  # replicate, shard, tensor",
        "# Modules whose parameters are gathered together, and whether backward gathers them again.",
        f"BLOCKS = {told.blocks | {'': told.blocks.get('', told.is_regathered)}}",
        "STYLES = {",
        *(f'    "{name}": {_style(name, style, told)},' for name, style in sorted(told.styles.items())),
        "}",
        *_remade(remade),
        *([_SELECTIVE] if is_selective else ["", ""]),
        "def parallelize(model, device_type):",
        '    """Cut the model in place; every rank passes its own rows, and losses are means of rows."""',
        f"    mesh = init_device_mesh(device_type, SHAPE, mesh_dim_names={KINDS!r})",
        "    modules = dict(model.named_modules())  # by their names before any is wrapped",
        "    if SHAPE[2] > 1:",
        '        parallelize_module(model, mesh["tensor"], STYLES)',
        *(_wrapping(is_selective) if remade else []),
        "    if SHAPE[0] * SHAPE[1] > 1:",
        '        data = mesh["replicate", "shard"] if SHAPE[0] > 1 else mesh["shard"]',
        *([f"    {policy}"] if policy else []),
        "        for name, module in reversed(list(modules.items())):",
        "            for again in of(name, BLOCKS):",
        f"                fully_shard(module, mesh=data, reshard_after_forward=again{more})",
        "    return model",
        "",
        "",
        "def of(name, patterns):",
        '    """What is said of a module under a pattern of its name (* is a number), as a list of one or none."""',
        "    of_digits = {p.replace('.', r'\\.').replace('*', '[0-9]+'): said for p, said in patterns.items()}",
        "    return [said for p, said in of_digits.items() if fullmatch(p, name)][:1]",
    ]
    return Written("\n".join(lines) + "\n", tuple(_unsaid(told, again)))


_CHECKPOINT = "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper"


def _remade(remade: dict[str, frozenset[tuple[str, int]]]) -> Iterator[str]:
    if remade:
        yield "# Modules that backward runs again, and the results that it need not make: kind, and number as they run."
        yield "AGAIN = {"
        for module, saved in sorted(remade.items()):
            yield f'    "{module}": {sorted(saved)},'
        yield "}"


def _wrapping(is_selective: bool) -> Iterator[str]:
    yield "    if getattr(getattr(model, 'config', None), 'use_cache', False):"
    yield "        model.config.use_cache = False  # a module that runs again would fill it twice"
    yield "    for name, module in list(modules.items()):"
    yield "        for saved in of(name, AGAIN):"
    if is_selective:
        yield "            how = {'context_fn': partial(saving, frozenset(saved))} if saved else {}"
        yield "            modules[name] = checkpoint_wrapper(module, **how)"
    else:
        yield "            modules[name] = checkpoint_wrapper(module)"
    yield "            model.set_submodule(name, modules[name])"


def _unsaid(told: Exported, again: Remade) -> Iterator[Unsaid]:
    plan = told.plan
    yield from told.unsaid()
    yield from told.chunks_unsaid()
    yield from told.recompute_unsaid(again)
    if plan.microbatches > 1:
        once = "" if plan.scattered else ", set_requires_gradient_sync(False) before all but the last"
        yield Unsaid(f"{plan.microbatches} micro-batches of a call: a loop of one's own there{once}", 0.0)
    if plan.accumulation > 1:
        what = f"{plan.accumulation} calls for each step of the optimizer: a loop of one's own there"
        yield Unsaid(what, 0.0)
    if plan.compiled:
        yield Unsaid("seconds of compiled code: call model.compile() there", 0.0)
    if plan.precision and not {"replicate", "shard"} & set(told.kinds):
        yield Unsaid(f"compute in {plan.precision[0]}: it goes with an axis of data there", 0.0)


def _style(name: str, style: str, told: Exported) -> str:
    """A module's style for `parallelize_module`."""
    if name in told.tables:
        lies = "input_layouts=Replicate()" if style == "rowwise" else "output_layouts=Replicate()"
    else:
        is_head = "." not in name and style == "colwise"  # the loss reads whole logits
        lies = "output_layouts=Replicate()" if is_head else ""
    return f"{style.title()}Parallel({lies})"

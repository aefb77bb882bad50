"""Compile every kernel for GPUs that are not there: prints a line each of registers, spills and shared memory.

Run in a process of its own, where Triton's interpreter is off. With `once` the first variant of each kernel and every
fourth of all are compiled, for one GPU and one dtype, which go around from variant to variant.
"""

from __future__ import annotations

import collections
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from autopar.kernels import (
    activations,
    adamw,
    bias_gelu,
    cross_entropy,
    cross_entropy_part,
    draws,
    dropout,
    gated,
    gelu_tanh,
    masked_softmax,
    rotary,
    rows,
    slot_sums,
)

SHARED = {80: 163 * 2**10, 89: 99 * 2**10, 90: 227 * 2**10}  # bytes that a block may have, by capability
INTEGERS = dict.fromkeys(("T", "START", "KEY", "COLUMN", "FIRST", "SECOND", "THIRD", "PLACES"), "*i64")
NUMBERS = ("eps", "factor", "scale", "cap", "of_target", "of_all", "kept", "length", "root", "beta1", "beta2")
POINTERS = {"bfloat16": "*bf16", "float32": "*fp32"}
PTXAS = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "ptxas")


def variants(dtype, capability):
    """Kernels with their constants, warps, and the arguments that are pointers to float32 whatever the dtype."""
    wide, is_half = ("DW", "DB", "MEAN", "ROOT"), dtype != "float32"
    flags = list(itertools.product((False, True), (False, True)))
    for columns, (means, adds) in itertools.product((768, 2048, 4096, 5120, rows.MOST_COLUMNS), flags):
        how = {"MEANS": means, "ADDS": adds}
        tile = rows.held(columns)
        back = rows.held_backward(columns, getattr(torch, dtype), means, adds, SHARED[capability])
        warps, warps_back = tile.pop("num_warps"), back.pop("num_warps")
        yield rows.forward_kernel, {**how, "ROUNDS": not means, **tile}, warps, ()
        if columns <= rows.most_columns(getattr(torch, dtype), means):
            yield rows.backward_kernel, {**how, **back}, warps_back, wide
    for means, adds in flags:
        how = {"MEANS": means, "ADDS": adds, "BLOCK": rows.WIDE}
        yield rows.wide_forward_kernel, {**how, "ROUNDS": not means}, rows.WIDE_WARPS, ()
        yield rows.wide_backward_kernel, how, rows.WIDE_WARPS, wide
    for means in (False, True):
        constants = {"MEANS": means, "ROWS": rows.ROWS, "COLUMNS": rows.COLUMNS}
        yield rows.weights_kernel, constants, rows.WARPS, wide
        constants = {"MEANS": means, "ROWS": rows.FOLDED[0], "COLUMNS": rows.FOLDED[1]}
        yield rows.fold_kernel, constants, rows.WARPS, wide
    block, warps = activations.BLOCK, activations.WARPS
    for kind in range(len(activations.BY_OPS)):
        how = {"KIND": kind, "IS_HALF": is_half, "BLOCK": block}
        yield gated.forward_kernel, how, warps, ()
        yield gated.backward_kernel, how, warps, ()
    for kind in (1, 2):  # 3 is the code of 2
        how = {"KIND": kind, "IS_HALF": is_half}
        yield activations.forward_kernel, {**how, "BLOCK": block}, warps, ()
        tile = {**how, "ROWS": bias_gelu.ROWS, "COLUMNS": bias_gelu.COLUMNS, "STAGES": bias_gelu.STAGES}
        yield bias_gelu.backward_kernel, tile, warps, wide
    yield gelu_tanh.backward_kernel, {"BLOCK": block}, warps, ()
    for columns, (caps, masks) in itertools.product((1024, masked_softmax.MOST_COLUMNS), flags):
        tile = masked_softmax.held(columns, columns)
        how, warps = {"SCALES": True, "CAPS": caps}, tile.pop("num_warps")
        yield masked_softmax.forward_kernel, {**how, "MASKS": masks, **tile}, warps, ()
        if not masks:
            yield masked_softmax.backward_kernel, {**how, **tile}, warps, ()
    drawn = draws.held(4096)
    warps = drawn.pop("num_warps")
    for adds in (False, True):
        yield dropout.kernel, {"ADDS": adds, "DIMS": 3, **drawn}, warps, ()
    for is_mask in (False, True):
        yield draws.kernel, {"IS_MASK": is_mask, "DIMS": 3, **drawn}, warps, ()
    for weighs, adds in flags:
        left_out = {name: None for name, is_given in (("WEIGHTS", weighs), ("BEFORE", adds)) if not is_given}
        constants = {**left_out, "SLOTS": 8, "BLOCK": slot_sums.BLOCK}
        yield slot_sums.kernel, constants, slot_sums.WARPS, ("BEFORE",)
    for scaled, master in itertools.product((False, True), (False, True)):
        constants = {"IS_SCALED": scaled, "HAS_MASTER": master, "BLOCK": adamw.BLOCK}
        yield adamw.kernel, constants, adamw.WARPS, ("M", "V", "W", "SCALE")
    for whole, sums in itertools.product((False, True), (False, True)):
        constants = {"IS_WHOLE": whole, "SUMS": sums, "BLOCK": cross_entropy.BLOCK}
        yield cross_entropy.forward_kernel, constants, cross_entropy.WARPS, ("MOST", "REST", "LOSS")
        if not sums:
            tile = cross_entropy.written(cross_entropy.BACK)
            warps = tile.pop("num_warps")
            yield cross_entropy.backward_kernel, {"IS_WHOLE": whole, **tile}, warps, ("DY", "LSE")
    between = cross_entropy_part.WARPS, ("MOST", "REST", "TOP", "OUT", "TOTAL", "LSE", "LOSS")
    for kernel in (cross_entropy_part.shares_kernel, cross_entropy_part.losses_kernel):
        yield kernel, {"ROWS": cross_entropy_part.ROWS}, *between
    for half, is_back, is_pair in itertools.product((32, 64, 128), (False, True), (False, True)):
        block, heads = rotary.heads_of(half, 64)
        constants = {"HALF": half, "BLOCK": block, "HEADS": heads, "IS_BACK": is_back, "IS_PAIR": is_pair}
        yield rotary.kernel, constants, rotary.WARPS, ()


def compiled(kernel, constants, warps, wide, dtype, capability):
    """What the assembler says of one variant."""
    names = kernel.arg_names
    signature = {n: _type(n, constants, wide, dtype) for n in names}
    aligned = {
        (names.index(n),): [["tt.divisibility", 16]]
        for n, t in signature.items()
        if t.startswith("*") or n == "columns"  # as those of models are
    }
    given = {(names.index(n),): value for n, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=given, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(made.asm["ptx"])
        file.flush()
        arch = re.search(r"\.target (\w+)", made.asm["ptx"])[1]
        said = subprocess.run(
            [PTXAS, "-v", f"-arch={arch}", file.name, "-o", os.devnull], capture_output=True, text=True
        )
    assert said.returncode == 0, said.stderr
    return {
        "kernel": _name(kernel),
        "constants": constants,
        "dtype": dtype,
        "capability": capability,
        "warps": warps,
        "registers": int(re.search(r"Used (\d+) registers", said.stderr)[1]),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", said.stderr))),
        "shared": made.metadata.shared,
        "doubles": len(re.findall(r"\.f64", made.asm["ptx"])),
    }


def _name(kernel):
    return f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__}"


def _type(name, constants, wide, dtype):
    if name in constants:
        return "constexpr"
    if name in INTEGERS:
        return INTEGERS[name]
    if name == "OUT" and "IS_MASK" in constants:
        return "*i8" if constants["IS_MASK"] else "*i32"
    if name.isupper():
        return POINTERS["float32" if name in wide else dtype]
    return "fp32" if name in NUMBERS else "i32"


def jobs():
    """Of each variant of each kernel, all that it is compiled for, as arguments of `compiled`."""
    found = collections.defaultdict(list)
    for dtype, capability in itertools.product(POINTERS, SHARED):
        counted = collections.Counter()
        for variant in variants(dtype, capability):
            if capability == 89 and variant[0] is not rows.backward_kernel:
                continue  # registers are those of 80: what differs is the shared memory that loads ahead may take
            name = _name(variant[0])
            counted[name] += 1
            found[name, counted[name]].append((*variant, dtype, capability))
    return list(found.values())


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") in (None, "0"), "the interpreter compiles nothing"
    once, seen = sys.argv[1:] == ["once"], set()
    for place, alike in enumerate(jobs()):
        name = _name(alike[0][0])
        if once and name in seen and place % 4:
            continue
        seen.add(name)
        for job in [alike[place % len(alike)]] if once else alike:
            print(json.dumps(compiled(*job)), flush=True)
    sys.exit(0)

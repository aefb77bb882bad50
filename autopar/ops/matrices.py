"""Linear algebra on one matrix or many: leading dims may be cut, matrices stay whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autopar.ops.entry import T, each, op
from autopar.ops.rows import Row, parse, rule_from, whole_dims
from autopar.sharding.notation import Rule


def of_each_matrix(arguments: Mapping[str, Any]) -> Rule:
    """Leading dims may be cut; the two dims of each matrix stay whole, and so do those of its results."""
    row = Row.of(next(iter(arguments.values()))).whole((-2, -1))
    leading = Row(row[:-2])
    tolerances = [arguments.get(name) for name in ("rtol", "atol")] if arguments["op"] == "pinv" else []
    of_each = [leading.last(t) if hasattr(t, "shape") else () for t in tolerances]  # one number, or one for each matrix
    results = [
        [*leading, *whole_dims(f"o{k}_", len(t.shape) - len(leading))] for k, t in enumerate(arguments["outputs"])
    ]
    return rule_from([row, *of_each], results)


def solved(arguments: Mapping[str, Any]) -> Rule | None:
    """Systems of equations: leading dims may be cut; the right side may be a vector for each matrix."""
    operands = list(arguments.values())[:2]
    matrix, side = reversed(operands) if arguments["op"] == "cholesky_solve" else operands
    if len(side.shape) != len(arguments["outputs"][0].shape):
        return None
    is_vector = arguments["op"] == "solve" and (len(side.shape) == 1 or tuple(side.shape) == tuple(matrix.shape[:-1]))
    row = "... b!" if is_vector else "... b! c!"
    if arguments["op"] == "cholesky_solve":
        return parse(f"{row}, ... m! n! -> {row}", linear="x")
    return parse(f"... m! n!, {row} -> {row}", linear="y")


LA = torch.linalg
op("inverse", LA.inv, "A:T", torch.inverse, T.inverse, rule=of_each_matrix)
op("det", LA.det, "A:T", torch.det, T.det, rule=of_each_matrix)
op("slogdet", LA.slogdet, "A:T", torch.slogdet, T.slogdet, rule=of_each_matrix)
each("logdet", rule=of_each_matrix)
op("matrix_exp", LA.matrix_exp, "input:T", torch.matrix_exp, T.matrix_exp, rule=of_each_matrix)
op("matrix_power", LA.matrix_power, "input:T, n", torch.matrix_power, T.matrix_power, rule=of_each_matrix)
op("linalg_cholesky", LA.cholesky, "input:T, *, upper=False", rule=of_each_matrix)
each("cholesky cholesky_inverse", "input:T, upper=False", rule=of_each_matrix)
op("pinv", LA.pinv, "input:T, *, rtol:T=None, atol:T=None, hermitian=False", rule=of_each_matrix)
op("svdvals", LA.svdvals, "A:T, *, driver=None", rule=of_each_matrix)
op("linalg_svd", LA.svd, "A:T, full_matrices=True, *, driver=None", rule=of_each_matrix)
each("svd", "input:T, some=True, compute_uv=True", rule=of_each_matrix)
op("linalg_qr", LA.qr, "A:T, mode='reduced'", rule=of_each_matrix)
each("eigh eigvalsh", "input:T, UPLO='L'", homes=[LA], rule=of_each_matrix)
each("lu_factor", "A:T, *, pivot=True", homes=[LA], rule=of_each_matrix)
each("solve", "A:T, B:T, *, left=True", homes=[LA], rule=solved)
each("solve_triangular", "input:T, B:T, *, upper, left=True, unitriangular=False", homes=[LA], rule=solved)
each("cholesky_solve", "input:T, input2:T, upper=False", rule=solved)

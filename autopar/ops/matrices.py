"""Linear algebra on one matrix or many: leading dims may be cut, matrices stay whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autopar.ops.entry import T, op
from autopar.ops.spelling import NAMES, parse, whole_dims
from autopar.sharding.notation import Rule


def of_each_matrix(arguments: Mapping[str, Any]) -> Rule:
    """Leading dims may be cut; the two dims of each matrix stay whole, and so do those of its results."""
    given = next(iter(arguments.values()))
    leading = [f"a{i}" for i in range(len(given.shape) - 2)]
    rows = [
        " ".join([*leading, *whole_dims(f"o{k}_", len(t.shape) - len(leading))])
        for k, t in enumerate(arguments["outputs"])
    ]
    tolerances = ["", ""] if arguments["op"] == "pinv" else []
    if any(getattr(arguments.get(n), "shape", ()) for n in ("rtol", "atol")):  # one for each matrix
        tolerances = [
            " ".join(leading[len(leading) - len(getattr(arguments.get(n), "shape", ())) :]) for n in ("rtol", "atol")
        ]
    return parse(f"{', '.join([' '.join([*leading, 'm!', 'n!']), *tolerances])} -> {', '.join(rows)}")


def solved(arguments: Mapping[str, Any]) -> Rule | None:
    """Systems of equations: leading dims may be cut; the right side may be a vector for each matrix."""
    first, second = list(arguments.values())[:2]
    matrix, side = (second, first) if arguments["op"] == "cholesky_solve" else (first, second)
    out = arguments["outputs"][0]
    if len(side.shape) != len(out.shape):
        return None
    is_vector = arguments["op"] == "solve" and (len(side.shape) == 1 or tuple(side.shape) == tuple(matrix.shape[:-1]))
    rest = "b!" if is_vector else "b! c!"
    rows = {"matrix": "... m! n!", "side": f"... {rest}"}
    order = ("side", "matrix") if arguments["op"] == "cholesky_solve" else ("matrix", "side")
    mine = NAMES[order.index("side")]
    return parse(f"{', '.join(rows[o] for o in order)} -> ... {rest}", linear=mine)


LA = torch.linalg
op("inverse", LA.inv, "A:T", torch.inverse, T.inverse, rule=of_each_matrix)
op("det", LA.det, "A:T", torch.det, T.det, rule=of_each_matrix)
op("slogdet", LA.slogdet, "A:T", torch.slogdet, T.slogdet, rule=of_each_matrix)
op("logdet", torch.logdet, "input:T", T.logdet, rule=of_each_matrix)
op("matrix_exp", LA.matrix_exp, "input:T", torch.matrix_exp, T.matrix_exp, rule=of_each_matrix)
op("matrix_power", LA.matrix_power, "input:T, n", torch.matrix_power, T.matrix_power, rule=of_each_matrix)
op("linalg_cholesky", LA.cholesky, "input:T, *, upper=False", rule=of_each_matrix)
op("cholesky", torch.cholesky, "input:T, upper=False", T.cholesky, rule=of_each_matrix)
op("cholesky_inverse", torch.cholesky_inverse, "input:T, upper=False", T.cholesky_inverse, rule=of_each_matrix)
op("pinv", LA.pinv, "input:T, *, rtol:T=None, atol:T=None, hermitian=False", rule=of_each_matrix)
op("svdvals", LA.svdvals, "A:T, *, driver=None", rule=of_each_matrix)
op("linalg_svd", LA.svd, "A:T, full_matrices=True, *, driver=None", rule=of_each_matrix)
op("svd", torch.svd, "input:T, some=True, compute_uv=True", T.svd, rule=of_each_matrix)
op("linalg_qr", LA.qr, "A:T, mode='reduced'", rule=of_each_matrix)
op("eigh", LA.eigh, "input:T, UPLO='L'", rule=of_each_matrix)
op("eigvalsh", LA.eigvalsh, "input:T, UPLO='L'", rule=of_each_matrix)
op("lu_factor", LA.lu_factor, "A:T, *, pivot=True", rule=of_each_matrix)
op("solve", LA.solve, "A:T, B:T, *, left=True", rule=solved)
op("solve_triangular", LA.solve_triangular, "input:T, B:T, *, upper, left=True, unitriangular=False", rule=solved)
op("cholesky_solve", torch.cholesky_solve, "input:T, input2:T, upper=False", T.cholesky_solve, rule=solved)

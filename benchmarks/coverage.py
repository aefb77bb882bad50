"""What is captured and equal to eager, and what is refused: the zoo, Colossal-Auto's lists, classes drawn by lot.

AUTOPAR_EXTRAS=.venv-extras python -m benchmarks.coverage > benchmarks/coverage.md
"""

from __future__ import annotations

import contextlib
import io
import logging
import platform
import warnings

import torch
import transformers

from autopar.letters import Letter
from tests.zoo.families import any_hf, any_inputs
from tests.zoo.replay import check
from tests.zoo.tables import COLOSSAL, DRAWN, ZOO, Entry


def result(name: str, entry: Entry) -> tuple[str, str, str]:
    """Nodes, what came of it, and what had to be assumed."""
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            graph = check(entry.build, entry.inputs, entry.assume, name)
            return str(len(list(graph.nodes))), "equal", "; ".join(graph.assumptions)
        except Letter as e:
            return "", f"refused: {e.what} ({e.at})", ""
        except Exception as e:  # neither: this must not be
            return "", f"FAILED: {type(e).__name__}: {str(e).splitlines()[0]}", ""


def main() -> None:
    tables = {
        "The zoo": ZOO,
        "Colossal-Auto's lists": COLOSSAL,
        "Drawn by lot (`python -m tests.zoo.lot 2026 20`)": {n: Entry(any_hf(n), any_inputs(n)) for n in DRAWN},
    }
    print(
        "# What is captured\n\nTrain mode, dropout on, same seeds: outputs within 1e-6, every gradient within "
        "1e-5 of the scale of DESIGN's Equality, buffers and the generator's state after replay equal to eager's."
    )
    print(
        f"`python -m benchmarks.coverage`, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}.\n"
    )
    for title, table in tables.items():
        rows = {name: result(name, entry) for name, entry in table.items()}
        equal = sum(r[1] == "equal" for r in rows.values())
        print(
            f"## {title}: {equal} of {len(rows)} captured and equal\n\n| model | nodes | result | assumed "
            "|\n|---|---|---|---|"
        )
        for name, cells in rows.items():
            print(f"| {name} | {' | '.join(cells)} |")
        print(flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    main()

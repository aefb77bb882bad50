"""python -m autopar.bench kernels [--device cuda] [--only rms_norm ...] [--small] [--no-data]

Times each family of kernels beside the ops that it stands for and what torch.compile makes of them, prints a table, and
keeps what `kernels=True` reads: which families are faster on this device.
"""

from __future__ import annotations

import argparse
import sys

import torch

from autopar.bench.kernels import line, table
from autopar.kernels import NAMES, can_run
from autopar.kernels.measured import keep
from autopar.kernels.timing import least_gains, measure

ALL = (*NAMES, "adamw")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m autopar.bench", description=__doc__)
    parser.add_argument("what", choices=["kernels"])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: the references, for a test")
    parser.add_argument("--only", nargs="*", choices=ALL, default=list(ALL))
    parser.add_argument("--small", action="store_true", help="small shapes, to see that it runs")
    parser.add_argument("--no-data", action="store_true", help="print alone, and keep nothing for kernels=True")
    asked = parser.parse_args()
    if asked.device == "cuda" and not (torch.cuda.is_available() and can_run()):
        print("not run: it needs a CUDA device and Triton (pip install triton)", file=sys.stderr)
        return 1
    rows = []
    print(table([], asked.device), flush=True)
    for row in measure(asked.only, asked.device, asked.small):
        rows.append(row)
        print(line(row), flush=True)
    if asked.device == "cuda" and not asked.no_data:
        print(f"kept in {keep(torch.cuda.get_device_name(), least_gains(rows))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

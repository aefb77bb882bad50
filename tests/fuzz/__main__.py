"""Random modules by the thousand.

- `python -m tests.fuzz 2000 [first]`: as many modules, from that seed on. It prints what was drawn, and each seed that
  came out otherwise.
- `python -m tests.fuzz 2000 [first] torch`: the same, and half of the steps are calls of any function of torch.
- `python -m tests.fuzz 380 [first] uneven`: modules of odd sizes on two and three ranks, under plans that cut a
  parameter of them unevenly and recompute. Modules of which no such plan is drawn are left out.
- `python -m tests.fuzz mutants`: which of the first 200 seeds notices each broken compiler of tests/mutants.py.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections import Counter

import torch

from autopar.letters import Letter
from tests.fuzz.trial import fuzz, kills
from tests.mutants import GPT2_MUTANTS, MUTANTS
from tests.random_plans import NoneUneven

LIMIT_S = 600.0  # of the ranks of one module: the machine may do other work beside


def main(count: int = 2000, first: int = 0, of_all: bool = False, uneven: bool = False) -> None:
    torch.set_num_threads(1)
    drawn, refused, wrong, started = Counter(), Counter(), [], time.process_time()
    for seed in range(first, first + count):
        try:
            drawn.update(fuzz(seed, of_all, LIMIT_S, uneven=uneven).names)
        except NoneUneven:
            count -= 1
        except Letter as e:
            refused[f"{type(e).__name__}: {e.what}"] += 1
            print(f"seed {seed}: {type(e).__name__}: {e.what}", flush=True)
        except Exception as e:
            wrong.append(seed)
            print(f"seed {seed}: {type(e).__name__}: {str(e)[:600]}", flush=True)
    print(
        f"{count} modules from seed {first} on, {sum(drawn.values())} steps "
        f"({', '.join(f'{n} {k}' for k, n in drawn.most_common())}), {len(wrong)} wrong, {sum(refused.values())} "
        "refused by a letter; "
        f"{time.process_time() - started:.0f} CPU s"
    )
    for text, n in refused.most_common():
        print(f"    {n} x {text}")
    if wrong:
        sys.exit(f"wrong: {wrong}")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    if sys.argv[1:] == ["mutants"]:
        torch.set_num_threads(1)
        for name, mutant in (MUTANTS | GPT2_MUTANTS).items():
            print(f'    "{name}": {kills(mutant, range(200))},', flush=True)
    else:
        words = {"torch", "uneven"}.intersection(sys.argv)
        main(*map(int, (a for a in sys.argv[1:] if a not in words)), of_all="torch" in words, uneven="uneven" in words)

"""Whether an old release of torch runs, whose own DTensors, or whose tools, cannot do what newer ones can."""

from __future__ import annotations

import torch

IS_2_11 = torch.__version__.startswith("2.11.")

"""The loop of train.py on Ray Train, which starts its workers again where one is lost.

python examples/ops/ray_train.py --workers 8 --folder /shared/run
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from train import loop


def worker(settings: dict[str, Any]) -> None:
    """What a worker runs, in a process group that Ray has made."""
    loop(Path(settings["folder"]), settings["steps"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--folder", required=True, help="on a file system that all nodes share")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--cpu", action="store_true")
    asked = parser.parse_args()
    trainer = TorchTrainer(
        worker,
        train_loop_config={"folder": asked.folder, "steps": asked.steps},
        scaling_config=ScalingConfig(num_workers=asked.workers, use_gpu=not asked.cpu),
        run_config=RunConfig(storage_path=asked.folder, failure_config=FailureConfig(max_failures=3)),
    )
    trainer.fit()

"""`from_pretrained`: a model in Hugging Face's folder, planned, and read in parts.

    model = autopar.from_pretrained("llama/", batch, parallel="fsdp")

transformers itself builds the model, from the config and from the names and shapes in the files: on meta, with the
classes, dtypes and ties that its own from_pretrained gives it. Values are read afterwards, by each rank those of its
parts.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from autopar.api import autoparallelize
from autopar.letters import BadWeights, NotServed
from autopar.module.checkpoint import Weights


def from_pretrained(
    path: str | Path,
    batch: Any,
    *,
    cls: Any = None,
    config: Any = None,
    dtype: str | torch.dtype = "auto",
    **planning: Any,
) -> Any:
    """The parallel model of a folder that `save_pretrained` wrote, in training mode, read in parts.

    It trains as the one that `autoparallelize` makes of transformers' own `from_pretrained`, and no rank ever holds it
    in full. All ranks call it.

    Args:
        path: A directory with config.json and safetensors.
        batch: Example tensors of the batch of all ranks, as `autoparallelize` takes them.
        cls: A model's class, or one such as AutoModelForCausalLM. None: the architecture that the config names.
        config: A config in place of the folder's.
        dtype: The dtype of parameters. "auto": the config's, or where it has none that of the files.
        **planning: Arguments of `autoparallelize`, and through it of `plan`.
    """
    transformers = _transformers()
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise BadWeights(
            f"{path} is not a directory with a config.json",
            advice="a directory that save_pretrained wrote, or huggingface_hub.snapshot_download(name), which is one",
        )
    if "weights" in planning:
        raise NotServed("weights= beside a path that weights are read from", advice="one of both")
    config = transformers.AutoConfig.from_pretrained(folder) if config is None else config
    if getattr(config, "quantization_config", None) is not None:
        raise NotServed(f"{path} holds quantized weights", advice="weights that are not quantized")
    has_generation = (folder / "generation_config.json").is_file()
    with _without_bars(transformers):
        model = _architecture(transformers, config, folder, cls).from_pretrained(
            None,
            config=config,
            state_dict=Weights(folder).on_meta(),
            device_map="meta",
            dtype=dtype,
            generation_config=transformers.GenerationConfig.from_pretrained(folder) if has_generation else None,
        )
    model.config.name_or_path = model.name_or_path = str(path)
    return autoparallelize(model.train(), batch, weights=str(folder), **planning)


def _architecture(transformers: Any, config: Any, folder: Path, asked: Any) -> Any:
    """The class of the model: as asked for, or the one that the config names."""
    if asked is not None and not issubclass(asked, torch.nn.Module):  # an Auto class: it knows what it would build
        with torch.device("meta"):
            return type(asked.from_config(copy.deepcopy(config)))
    names = getattr(config, "architectures", None) or []
    found = asked or (getattr(transformers, names[0], None) if names else None)
    if found is None:
        raise NotServed(
            f"the config of {folder} names no class that transformers {transformers.__version__} has",
            seen=f"architectures: {', '.join(names) or 'none'}",
            advice="cls=transformers.AutoModelForCausalLM, or a class of yours",
        )
    return found


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as e:
        raise NotServed("from_pretrained needs transformers", advice="pip install transformers") from e


@contextlib.contextmanager
def _without_bars(transformers: Any) -> Iterator[None]:
    """Without transformers' progress bars, which would show that weights are read while none are."""
    bars = transformers.utils.logging
    was_on = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            bars.enable_progress_bar()

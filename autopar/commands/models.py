"""Make the model and inputs that a command line names."""

from __future__ import annotations

import difflib
import importlib.util
import json
import logging
import math
import re
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.letters import Letter, among

log = logging.getLogger("autopar")
_DEFAULT = {"batch": 8, "seq": 512}


class NoModel(Letter):
    """Raised where a command line names a model or inputs that cannot be made."""


@dataclass(frozen=True, slots=True)
class Named:
    """A model and inputs, as a command line names them."""

    name: str
    inputs: str = ""

    @property
    def asks_for_batch(self) -> bool:
        """Whether the number of rows is left to a search: batch=auto."""
        return "batch=auto" in self.inputs.split(",")

    def with_batch(self, rows: int) -> Named:
        """The same with so many rows in place of batch=auto."""
        return replace(self, inputs=self.inputs.replace("batch=auto", f"batch={rows}"))

    def made(self, device: str = "meta") -> tuple[nn.Module, Any]:
        """The model in training mode, and a batch for it, with random values on a real device."""
        if self.asks_for_batch:
            raise NoModel(
                f"--inputs {self.inputs} leaves the batch to a search, which autopar plan makes",
                advice="autopar plan, of a configuration; or batch=8",
            )
        if re.fullmatch(r".+\.py:\w+", self.name):
            return self._by_function(device)
        entry = _configuration(self.name)
        return self._by_configuration(entry, device)

    def batch_of(self, model: nn.Module, device: str = "meta") -> Any:
        """A batch of these sizes for a model that a configuration made."""
        return _batch(model.config, _sizes(self.inputs), device)

    def _by_function(self, device: str) -> tuple[nn.Module, Any]:
        path, _, function = self.name.rpartition(":")
        build = getattr(_module(Path(path)), function, None)
        if not callable(build):
            raise NoModel(f"{path} has no function {function}", advice=f"{path}:build, which returns a model")
        try:
            with torch.device(device):
                made = build()
        except Exception as e:
            raise NoModel(f"{self.name} raised {type(e).__name__}: {e}", at=_line_of(e, path)) from e
        model, batch = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not isinstance(model, nn.Module):
            raise NoModel(f"{self.name} returned a {type(model).__name__}, no model", advice="return model, inputs")
        given = _tensors(self.inputs, device) if self.inputs else batch
        if given is None:
            raise NoModel(
                f"{self.name} returned no inputs, and none were named",
                advice="return model, inputs; or --inputs x=8x512,labels=8:int64",
            )
        return model.train(), given

    def _by_configuration(self, entry: Mapping[str, Any], device: str) -> tuple[nn.Module, Any]:
        transformers = _transformers()
        transformers.logging.set_verbosity_error()
        config = transformers.AutoConfig.for_model(**entry["config"])
        kind = getattr(transformers, entry["architecture"], None)
        if kind is None:
            raise NoModel(
                f"transformers {transformers.__version__} has no {entry['architecture']}",
                advice="another release of transformers",
            )
        with torch.device(device):
            model = kind(config)
        sizes = _sizes(self.inputs)
        batch = _batch(config, sizes, device)
        asked_for = ("batch",) if "pixel_values" in batch else ("batch", "seq")
        if left_out := [name for name in asked_for if name not in sizes]:
            shapes = ", ".join(f"{name} {'x'.join(map(str, tensor.shape))}" for name, tensor in batch.items())
            log.info("--inputs leaves out %s: the batch is %s", " and ".join(left_out), shapes)
        return model.train(), batch


def _module(path: Path) -> Any:
    if not path.exists():
        raise NoModel(
            f"the file {path} does not exist", advice="file.py:build, a configuration such as gpt2, or a config.json"
        )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    try:
        spec.loader.exec_module(module)
    except Exception as e:
        raise NoModel(f"{path} cannot be imported: {type(e).__name__}: {e}", at=_line_of(e, str(path))) from e
    return module


def _line_of(error: Exception, path: str) -> str:
    """The last line of a user's file in an error's traceback; "" where there is none."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
    return f"{frames[-1].line}    {path}:{frames[-1].lineno}" if frames else ""


def shipped() -> Mapping[str, Any]:
    """The shipped configurations, by name."""
    text = resources.files("autopar.commands").joinpath("models.json").read_text(encoding="utf-8")
    found: Mapping[str, Any] = json.loads(text)
    return found


def _configuration(name: str) -> Mapping[str, Any]:
    """Architecture and values of a configuration, shipped or from a config.json."""
    known = shipped()
    if name in known:
        entry: Mapping[str, Any] = known[name]
        return entry
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if path.suffix != ".json" or not path.exists():
        near = difflib.get_close_matches(name, known, n=1)
        raise NoModel(
            f"no model is called {name!r}",
            seen=among(known, name),
            advice=near[0] if near else "file.py:build, one of these, or the path of a config.json",
        )
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return {"architecture": data["architectures"][0], "config": {**data, "model_type": data["model_type"]}}
    except (ValueError, KeyError, IndexError, TypeError) as e:
        raise NoModel(f"{path} is not the config.json of a model: {type(e).__name__}: {e}") from None


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise NoModel("configurations need transformers", advice="pip install transformers, or file.py:build") from None
    return transformers


def _sizes(text: str) -> dict[str, int]:
    """Parse `batch=8,seq=512`."""
    found: dict[str, int] = {}
    for item in filter(None, text.split(",")):
        name, _, number = item.partition("=")
        if name not in _DEFAULT or not number.isdecimal() or not int(number):
            raise NoModel(
                f"--inputs {item!r} is not batch=N or seq=N", seen=f"--inputs {text}", advice="batch=8,seq=512"
            )
        found[name] = int(number)
    return found


def _batch(config: Any, sizes: Mapping[str, int], device: str) -> dict[str, torch.Tensor]:
    """A batch for a model of this configuration."""
    if hasattr(config, "image_size") and "seq" in sizes:
        raise NoModel("a model of images has no seq", seen=f"seq={sizes['seq']}", advice="batch=8")
    sizes = {**_DEFAULT, **sizes}
    rows = sizes["batch"]
    if hasattr(config, "image_size"):
        side = config.image_size
        channels = getattr(config, "num_channels", 3)
        labels = _whole((rows,), config.num_labels, device)
        return {"pixel_values": torch.randn(rows, channels, side, side, device=device), "labels": labels}
    longest = getattr(config, "max_position_embeddings", None) or sizes["seq"]
    if sizes["seq"] > longest:
        raise NoModel(f"a model of {longest} positions has no place for seq={sizes['seq']}", advice=f"seq={longest}")
    ids = _whole((rows, sizes["seq"]), config.vocab_size, device)
    return {"input_ids": ids, "labels": ids}


def _tensors(text: str, device: str) -> dict[str, torch.Tensor]:
    """Parse `x=8x512,labels=8:int64` and make the tensors; integers are 0 or 1."""
    found = {}
    for item in text.split(","):
        match = re.fullmatch(r"(\w+)=(\d+(?:x\d+)*)(?::(\w+))?", item)
        dtype = getattr(torch, match[3] or "float32", None) if match else None
        shape = tuple(map(int, match[2].split("x"))) if match else ()
        if match is None or not isinstance(dtype, torch.dtype) or 0 in shape:
            raise NoModel(f"--inputs {item!r} names no tensor", advice="x=8x512, or labels=8:int64")
        whole = not (dtype.is_floating_point or dtype.is_complex)
        found[match[1]] = (
            _whole(shape, 2, device).to(dtype) if whole else torch.randn(shape, dtype=dtype, device=device)
        )
    return found


def _whole(shape: tuple[int, ...], most: int, device: str) -> torch.Tensor:
    if device == "meta":
        return torch.empty(shape, dtype=torch.int64, device=device)
    return torch.randint(0, most, shape, device=device)


def count_of(model: nn.Module) -> str:
    """Text about a model's number of parameters."""
    count = sum(p.numel() for p in model.parameters())
    power = min(3, int(math.log10(max(1, count))) // 3)
    return f"{count / 1000**power:.3g}{('', ' thousand', ' million', ' billion')[power]} parameters"


def loss_of(forward: Any, batch: Any) -> torch.Tensor:
    """The loss that a model returns for a batch."""
    out = forward(**batch) if isinstance(batch, dict) else forward(*batch)
    first = out.get("loss") if hasattr(out, "get") else out[0] if isinstance(out, (tuple, list)) else out
    if not isinstance(first, torch.Tensor) or first.dim():
        raise NoModel(f"this {type(forward).__name__} returns no loss", advice="a model whose first output is its loss")
    return first

"""Read and write checkpoints of parallel models, also of parameters that are cut by blocks.

torch.distributed.checkpoint asks a DTensor which rectangles of the whole tensor it holds. Where a dim is cut by blocks
(a fused QKV weight by heads), torch's own answer is one rectangle, which is wrong; this module gives the right ones.

    dcp.save({"model": model.state_dict()}, checkpoint_id=path)          # on one mesh
    dcp.load({"model": other.state_dict()}, checkpoint_id=path)          # on another, or on one device

`read` fills parameters from a directory of safetensors, a rank's part at a time; `whole_state` is the state dict of one
device, for `save_pretrained` and the like.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from autopar.letters import BadWeights, NotServed
from autopar.module.storage import Storage
from autopar.runtime.brief_patches import logged_from
from autopar.runtime.owned_meshes import far_of
from autopar.runtime.patches import answer_checkpoints
from autopar.runtime.private import StridedShard, local_part
from autopar.sharding.placement import runs

# offsets and sizes in the whole tensor, and slices of the local part
Rectangle = tuple[tuple[int, ...], tuple[int, ...], tuple[slice, ...]]


def is_cut_by_blocks(tensor: DTensor) -> bool:
    """Whether some dim of the tensor is cut by blocks.

    torch itself uses strided shards only beside another cut of the same dim.
    """
    dims = [p.dim for p in tensor.placements if hasattr(p, "dim")]
    return any(isinstance(p, StridedShard) and dims.count(p.dim) == 1 for p in tensor.placements)


def rectangles(tensor: DTensor) -> list[Rectangle]:
    """The whole tensor's rectangles on this rank: offsets, sizes, and slices of the local part."""
    mesh = tensor.device_mesh
    at = mesh.get_coordinate()
    if at is None:
        return []
    runs_here = runs(tensor.shape, Storage.like(tensor).sharding, tuple(mesh.shape), at)
    found: list[Rectangle] = []
    lies = list(map(_starts, runs_here))
    for which in itertools.product(*(range(len(run)) for run in runs_here)):
        offsets = tuple(runs_here[d][i][0] for d, i in enumerate(which))
        sizes = tuple(runs_here[d][i][1] for d, i in enumerate(which))
        starts = [lies[d][i] for d, i in enumerate(which)]
        here = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
        found.append((offsets, sizes, here))
    return found


def _starts(run: list[tuple[int, int]]) -> list[int]:
    """Start of each piece of a dim in the local part, where the pieces lie end to end."""
    return list(itertools.accumulate((size for _, size in run), initial=0))


def teach_dtensor() -> None:
    """Let DTensors that are cut by blocks give torch.distributed.checkpoint their rectangles."""
    answers: dict[str, Callable[..., Any]] = {
        "__create_write_items__": _write_items,
        "__create_chunk_list__": _chunk_list,
        "__get_tensor_shard__": _tensor_shard,
    }
    answer_checkpoints(lambda tensor: is_cut_by_blocks(tensor) or far_of(tensor) is not None, answers)


def _write_items(tensor: DTensor, fqn: str, _: Any) -> list[WriteItem]:
    properties = TensorProperties.create_from_tensor(tensor.to_local())
    found = []
    for chunk in _chunk_list(tensor):
        data = TensorWriteData(chunk, properties, tensor.size())
        found.append(WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
    return found


def _chunk_list(tensor: DTensor) -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for at, sizes, _ in rectangles(tensor)]


def _tensor_shard(tensor: DTensor, index: MetadataIndex) -> Tensor:
    return next(local_part(tensor)[where] for at, _, where in rectangles(tensor) if index.offset == torch.Size(at))


def whole(tensor: Tensor) -> Tensor:
    """A DTensor in full on every rank, gathered from all ranks; other tensors as they are, detached."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    if not is_cut_by_blocks(tensor):
        # torch warns that a dim which several axes cut is gathered in several steps
        with logged_from("torch.distributed.tensor", logging.ERROR):
            return tensor.detach().full_tensor()
    parts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, (rectangles(tensor), tensor.to_local().detach().cpu()))
    made = torch.empty(tensor.shape, dtype=tensor.dtype)
    for held, local in parts:
        for offsets, sizes, where in held:
            made[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] = local[where]
    return made.to(tensor.device)


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """The single-device state dict, on rank 0's CPU and empty elsewhere, gathered a tensor at a time."""
    first = torch.distributed.get_rank() == 0
    found = dict[str, Tensor]()
    known = dict[int, Tensor]()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and id(tensor) not in known:
            full = whole(tensor)
            known[id(tensor)] = full.cpu() if first else torch.empty(0)
        if first:
            found[name] = known[id(tensor)] if isinstance(tensor, Tensor) else tensor
    return found


class Weights:
    """A file or directory of safetensors that is read part by part."""

    def __init__(self, path: str | Path) -> None:
        try:
            from safetensors import safe_open  # an optional dependency
        except ImportError as e:
            raise NotServed(
                "weights= reads safetensors, and that library is not installed", advice="pip install safetensors"
            ) from e
        if not isinstance(path, (str, Path)):
            raise BadWeights(
                f"weights={path!r} is not a path",
                advice="a .safetensors file, or a directory as save_pretrained writes it",
            )
        self.path = Path(path)
        self._open = safe_open
        self._files = dict[Path, Any]()
        if self.path.is_dir() and (index := self.path / "model.safetensors.index.json").is_file():
            try:
                self.at = {
                    str(name): self.path / str(file)
                    for name, file in json.loads(index.read_text())["weight_map"].items()
                }
            except (ValueError, KeyError, AttributeError) as e:
                raise BadWeights(f"{index} is not an index of weights", seen=f"{type(e).__name__}: {e}") from e
        else:
            files = sorted(self.path.glob("*.safetensors")) if self.path.is_dir() else [self.path]
            self.at = {name: file for file in files for name in self._file(file).keys()}  # noqa: SIM118
        if not self.at:
            raise BadWeights(
                f"{self.path} holds no safetensors",
                advice="a .safetensors file, or a directory as save_pretrained writes it",
            )

    def _file(self, path: Path) -> Any:
        if path not in self._files:
            try:
                self._files[path] = self._open(str(path), framework="pt")
            except Exception as e:
                raise BadWeights(f"{path} cannot be read", seen=f"{type(e).__name__}: {e}") from e
        return self._files[path]

    def name_of(self, names: Iterable[str], prefix: str) -> str | None:
        """The first of `names` that the file has, with or without the base model's prefix, or None."""
        for name in names:
            candidates = [name]
            if prefix:
                candidates += [f"{prefix}.{name}", name.removeprefix(f"{prefix}.")]
            if there := [candidate for candidate in candidates if candidate in self.at]:
                return there[0]
        return None

    def on_meta(self) -> dict[str, Tensor]:
        """Tensors without values, of the names, shapes and dtypes in the file."""
        found = {}
        for name, path in self.at.items():
            held = self._file(path).get_slice(name)
            shape = tuple(held.get_shape())
            empty = held[0:0] if shape else self._file(path).get_tensor(name)  # has its dtype
            found[name] = torch.empty(shape, dtype=empty.dtype, device="meta")
        return found

    def part(self, name: str, shape: Sequence[int], places: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """The elements of a tensor at these places of each dim."""
        held = self._file(self.at[name]).get_slice(name)
        if tuple(held.get_shape()) != tuple(shape):
            raise BadWeights(
                f"{name} has another shape than the model's",
                seen=f"{tuple(held.get_shape())} in {self.at[name].name}, {tuple(shape)} in the model",
            )
        if not shape:
            return self._file(self.at[name]).get_tensor(name).to(dtype)
        first = [int(p.min()) if p.numel() else 0 for p in places]
        hull = held[tuple(slice(f, int(p.max()) + 1 if p.numel() else f) for f, p in zip(first, places, strict=True))]
        for d, (f, p) in enumerate(zip(first, places, strict=True)):
            if hull.shape[d] != p.numel():
                hull = hull.index_select(d, p - f)
        return hull.to(dtype).contiguous()


def read(
    model: nn.Module,
    path: str | Path,
    places_of: Callable[[str, Tensor], list[Tensor]],
    keep: Callable[[str, Tensor, Tensor], None],
) -> set[int]:
    """Call `keep(name, tensor, part)` with this rank's part of every parameter and saved buffer.

    The ids of these tensors are returned.
    """
    weights = Weights(path)
    prefix = str(getattr(model, "base_model_prefix", "") or "")
    saved = set(model.state_dict(keep_vars=True))
    names: dict[int, tuple[Tensor, list[str]]] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        if name in saved:
            names.setdefault(id(tensor), (tensor, []))[1].append(name)
    missing = []
    for tensor, own in names.values():
        found = weights.name_of(own, prefix)
        if found is None:
            missing.append(own[0])
        else:
            keep(own[0], tensor, weights.part(found, tuple(tensor.shape), places_of(own[0], tensor), tensor.dtype))
    if missing:
        raise BadWeights(
            f"{path} lacks {', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}",
            seen=f"it holds {', '.join(sorted(weights.at)[:5])}, ...",
            advice="the weights of this model",
        )
    return set(names)

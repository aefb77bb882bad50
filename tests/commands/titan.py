"""A stand-in for torchtitan 0.3.0: its configuration, as far as an exported registry reads and sets it.

The names of modules, classes and fields, and the values that fields take, were read from the release on the package
index (torchtitan-0.3.0-py3-none-any.whl, files of 2026-09-03: torchtitan/config/configs.py, torchtitan/trainer.py,
torchtitan/distributed/activation_checkpoint.py, torchtitan/components/loss.py). Classes have slots there, too: a field
that they do not have cannot be set.
"""

from __future__ import annotations

import types
from dataclasses import make_dataclass
from typing import Any

DTYPES = ("bfloat16", "float32")

# What each field of a section may be: a type, or a tuple of values.
FIELDS: dict[str, dict[str, Any]] = {
    "parallelism": {
        "data_parallel_replicate_degree": int,
        "data_parallel_shard_degree": int,
        "fsdp_reshard_after_forward": ("default", "always", "never"),
        "enable_fsdp_symm_mem": bool,
        "tensor_parallel_degree": int,
        "enable_sequence_parallel": bool,
        "spmd_backend": ("partial_dtensor", "full_dtensor", "spmd_types"),
        "pipeline_parallel_degree": int,
        "module_fqns_per_model_part": list,
        "pipeline_parallel_first_stage_less_layers": int,
        "pipeline_parallel_last_stage_less_layers": int,
        "pipeline_parallel_layers_per_stage": int,
        "pipeline_parallel_schedule": str,
        "pipeline_parallel_schedule_csv": str,
        "pipeline_parallel_microbatch_size": int,
        "context_parallel_degree": int,
        "context_parallel_load_balancer": str,
        "context_parallel_ptrr_mask_key": str,
        "expert_parallel_degree": int,
    },
    "training": {
        "local_batch_size": int,
        "global_batch_size": int,
        "seq_len": int,
        "max_norm": float,
        "steps": int,
        "enable_cpu_offload": bool,
        "disable_cuda_graphs": bool,
        "dtype": DTYPES,
        "mixed_precision_param": DTYPES,
        "mixed_precision_reduce": ("float32",),
        "gc_freq": int,
        "gc_debug": bool,
    },
    "compile": {"enable": bool, "enable_async_tensor_parallel": bool, "components": list, "backend": str},
    "loss": {"num_chunks": int, "loss_fn": object},
}


def modules() -> dict[str, types.ModuleType]:
    """Modules by name, for sys.modules."""
    sections = {
        name: make_dataclass(name, [(f, Any, None) for f in fields], slots=True) for name, fields in FIELDS.items()
    }
    fields = [(name, Any, None) for name in (*sections, "activation_checkpoint")]
    config = make_dataclass("Config", fields, slots=True)
    policies = {name: type(name, (), {"Config": make_dataclass(name, [])}) for name in ("FullAC", "SelectiveAC")}
    held: dict[str, dict[str, Any]] = {
        "torchtitan": {},
        "torchtitan.distributed": {},
        "torchtitan.distributed.activation_checkpoint": policies,
        "torchtitan.models": {},
        "torchtitan.models.llama3": {},
        "torchtitan.models.llama3.config_registry": {
            "llama3_8b": lambda: config(**{name: section() for name, section in sections.items()})
        },
        "torchtitan.trainer": {"Trainer": type("Trainer", (), {"Config": config})},
    }
    found = {}
    for name, members in held.items():
        found[name] = types.ModuleType(name)
        vars(found[name]).update(members)
    return found


def wrong(config: Any) -> list[str]:
    """Fields of a configuration whose values torchtitan does not take."""
    found = []
    for section, fields in FIELDS.items():
        for name, allowed in fields.items():
            value = getattr(getattr(config, section), name)
            is_right = value in allowed if isinstance(allowed, tuple) else type(value) is allowed
            if value is not None and not is_right:
                found.append(f"{section}.{name} = {value!r}")
    return found

"""Functions of torch by how a capture handles them; `functions.py` has the handlers."""

from __future__ import annotations

import torch
from torch import Tensor

_T = Tensor
# answered by the tensor itself: they do not depend on values, and make none
QUERIES = frozenset(
    {
        _T.size,
        _T.dim,
        _T.numel,
        _T.stride,
        _T.is_floating_point,
        _T.is_complex,
        _T.is_contiguous,
        _T.element_size,
        _T.__len__,
        _T.storage_offset,
        _T.ndimension,
        _T.get_device,
        _T.__hash__,
        _T.nelement,
        _T.is_signed,
        _T.is_same_size,
        _T.is_inference,
        _T.dim_order,
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
        torch.is_tensor,
        torch.is_same_size,
        torch.is_grad_enabled,
        torch.get_default_dtype,
        torch.result_type,
        torch.can_cast,
        torch.promote_types,
        torch.iinfo,
        torch.finfo,
    }
)
# Functions that a graph cannot hold, with the reason and the advice of the letter.
REFUSED = {
    **dict.fromkeys(
        (_T.register_hook, _T.retain_grad, _T.register_post_accumulate_grad_hook),
        ("a hook on a tensor inside the model would be lost", "hooks on parameters of the parallel model"),
    ),
    **dict.fromkeys(
        (_T.backward, torch.autograd.grad, torch.autograd.backward),
        (
            "a derivative is taken inside the model, which a graph of its forward cannot hold",
            "the loss as an output; of a penalty on gradients torch.func.grad, whose ops are captured",
        ),
    ),
    **dict.fromkeys(
        (_T.set_, _T.resize_, _T.resize_as_, _T.detach_, _T.as_strided_, _T.data.__set__, _T.grad.__set__),
        ("a tensor is given another shape or storage in place", "the form that returns a new tensor"),
    ),
    **dict.fromkeys(
        (_T.apply_, _T.map_, _T.map2_), ("a Python function is called for each element", "torch functions")
    ),
    **dict.fromkeys(
        (_T.as_strided, torch.as_strided),
        ("as_strided reads a tensor by its memory layout, which a plan may change", "narrow, view or index"),
    ),
    **dict.fromkeys(
        (_T.numpy, _T.__array__, _T.data_ptr, _T.untyped_storage, _T.storage),
        ("the model leaves torch with a tensor's memory", "torch functions"),
    ),
}
# another shape in place, the same numbers
RESHAPED_IN_PLACE = frozenset({_T.swapaxes_, _T.swapdims_, _T.transpose_, _T.t_, _T.squeeze_, _T.unsqueeze_})
# they ask for a value: the recorder answers by the call's assumptions, or refuses
READ_VALUES = frozenset({_T.item, _T.tolist, _T.__bool__, _T.__int__, _T.__float__, _T.__index__, _T.__complex__})
# the shape of their result depends on values
SHAPED_BY_VALUES = frozenset(
    {
        torch.unique,
        _T.unique,
        torch.unique_consecutive,
        _T.unique_consecutive,
        torch.bincount,
        _T.bincount,
    }
)
# names of operators that write to their first operand
IN_PLACE_OPERATORS = frozenset(
    f"__{n}__"
    for n in (
        "iadd",
        "isub",
        "imul",
        "itruediv",
        "ifloordiv",
        "ipow",
        "imod",
        "iand",
        "ior",
        "ixor",
        "ilshift",
        "irshift",
        "setitem",
        "idiv",
    )
)

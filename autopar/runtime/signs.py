"""Signs in texts of torch's errors: read where a job is started as well, which has no need of torch."""

from __future__ import annotations

_SIGNS = (
    "gloo",
    "NCCL",
    "Connection closed",
    "Connection reset",
    "Timed out",
    "timed out",
    "Broken pipe",
    "Socket",
    "wait timeout",
    "caused pair closure",
)


def tells_of_another(error: str) -> bool:
    """Whether the text of an error of torch's is about another rank that was lost."""
    return any(sign in error for sign in _SIGNS)

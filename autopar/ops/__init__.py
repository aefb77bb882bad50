"""The canonical ops: what each is called, how it may be cut, and what it costs."""

from autopar.ops import families as families
from autopar.ops.rules import rule

__all__ = ["rule"]

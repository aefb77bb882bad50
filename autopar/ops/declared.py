"""Say which ops have a rule of their own: the tracer leaves those whole, whatever torch makes them of."""

from __future__ import annotations

WHOLE: set[str] = set()  # by the names that graphs print

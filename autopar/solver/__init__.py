"""Space -> Plan: one choice per site. Numbers and names only; imports no torch."""

from autopar.solver.plan import Plan
from autopar.solver.program import solve

__all__ = ["Plan", "solve"]

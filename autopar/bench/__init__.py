"""Measurements of this machine: `python -m autopar.bench kernels`."""

"""Measure a machine: a cluster file with what its collectives and ops really take."""

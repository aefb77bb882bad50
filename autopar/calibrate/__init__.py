"""Measure a machine: write a cluster file with the measured times of its collectives and ops."""

"""Stages: the parts of a model that run on different devices, and the orders in which they do."""

"""Trainers of other projects, on their public extension points. Nothing of them is imported unless its module is.

huggingface.py    transformers.Trainer
"""

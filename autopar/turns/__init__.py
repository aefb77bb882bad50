"""The axis of time: a batch passes in turns through one program, by the same algebra as an axis of devices."""

from autopar.turns.chunked import in_chunks, why_whole
from autopar.turns.head import FEW, Head, head_of, numbers_of_chunks
from autopar.turns.micro_batches import in_micro_batches

__all__ = ["FEW", "Head", "head_of", "in_chunks", "in_micro_batches", "numbers_of_chunks", "why_whole"]

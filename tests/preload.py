"""Imports of the server that forks ranks and scripts: models of transformers, which every rank would import again.

What is there is left out of the garbage collections of the processes that are forked.
"""

import gc

import transformers.models.bert.modeling_bert
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama

import autopar.testing.preload

gc.freeze()

__all__ = ["autopar", "transformers"]

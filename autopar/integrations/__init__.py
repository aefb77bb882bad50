"""Adapters for trainers of other projects, on their public extension points.

    adapting.py       what the others share
    huggingface.py    transformers.Trainer
    accelerate.py     accelerate.Accelerator
    fabric.py         lightning.fabric.Fabric
    lightning.py      lightning.Trainer; lightning_calls.py finds what it plans for
    trl.py            trl.SFTTrainer
    pretrained.py     from_pretrained: a model in transformers' folder, read in parts

A project is imported only where its adapter is.
"""

"""Trainers of other projects, on their public extension points. Nothing of them is imported unless its module is.

adapting.py       what the others share
huggingface.py    transformers.Trainer
accelerate.py     accelerate.Accelerator
fabric.py         lightning.fabric.Fabric
lightning.py      lightning.Trainer
trl.py            trl.SFTTrainer
"""

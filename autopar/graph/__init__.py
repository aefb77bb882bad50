"""The value Graph: what a model computes, one node per canonical op. (`layers.py` is read without torch.)"""

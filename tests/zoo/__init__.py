"""Models that people have, tiny, from config classes alone: what the tracer is held against.

tables.py     what is captured: the zoo, the lists of other systems, classes drawn by lot
families.py   how each is built and called
replay.py     eager and graph side by side: outputs, gradients, buffers, generator
"""

"""Graph -> Space: every legal choice, priced.

    space.py          the value: sites, edges and what they cost     without torch, as memory.py and windows.py are
    shardings.py      builds it                                      from the parts beside it

Names are imported from their files: importing this folder brings no torch.
"""

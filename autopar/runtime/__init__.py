"""What emitted programs call at run time, and the job of ranks: collectives, random numbers, faults, agreement.

`private.py` has the private parts of torch, `patches.py` what is replaced in torch for the whole process, and
`brief_patches.py` what is for a while.
"""

"""The commands of `autopar`: each takes the parsed arguments, calls the compiler, and prints.

    models.py     a model and its inputs, from a file, a shipped configuration or a config.json
    planning.py   plan, fit
    plans.py      show, explain, report, diff: of a plan that was saved
    machines.py   check, calibrate, bench, run
    verifying.py  verify: a plan's program beside one device

A command is a function from its arguments to the exit status of the process; `cli.py` declares them.
"""

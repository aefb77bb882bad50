"""The commands of `autopar`: each reads what a command line says, calls the compiler, and prints.

    models.py     a model and its inputs, from a file, a shipped configuration or a config.json
    planning.py   plan, fit
    plans.py      show, explain, report, diff: of a plan that was saved
    machines.py   check, calibrate, bench, run
    verifying.py  verify: a plan's program beside one device

A command is a function of its arguments that returns what the process exits with. `cli.py` says what they are.
"""

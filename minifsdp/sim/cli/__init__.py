"""What can be asked for on the command line.

values.py      values of options, and what was probably meant
blame.py       whose fault an exception is: the model's, or ours
options.py     the options, and grids of them
conflicts.py   options that make no sense together
run.py         one run
plan.py        a search for the best one
"""

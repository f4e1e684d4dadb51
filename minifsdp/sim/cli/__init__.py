"""What can be asked for on the command line.

values.py      values of options, and what was probably meant
files.py       whether files can be written
machine.py     which GPU, and what is around it: by name, or from a file
not_modelled.py   what is known elsewhere, and refused by name
conflicts.py   options that make no sense together
options.py     the settings of a run, and grids of them
commands.py    what a run and calibrate take besides
terminal.py    Ctrl-C, progress and colours, for all programs here
blame.py       whose fault an exception is: the model's, or ours
run.py         one run
runs.py        all that were asked for, and what is printed and written of them
against.py     a run's memory beside that of a snapshot
plan.py        a search for the best run
cluster.py     the constants of a preset, to be edited
calibrate.py   the constants of one's own machine
"""

"""Labs: open-ended bonus work. What counts is the figure that a solution reaches, and not how.

Each folder here has the files that a student gets. measure/ says what is looked at, and solutions/
has ours, which students do not get. lab.py (`make lab`) runs all of it.
"""

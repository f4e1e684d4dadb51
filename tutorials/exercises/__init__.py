"""The course: rebuild FSDP yourself, one concept after the other, with an answer in seconds.

    make student OUT=~/my-fsdp      student.py makes a folder: concept files, bodies taken out
    make grade DIR=~/my-fsdp        grade.py says what is right, what is not, and why

How a solution is graded::

    exercises.toml ──> catalog.py     which functions are exercises, and what they are worth
    checks/*.py                       for each exercise: what to look at
    source.py                         what can be said without running anything
    overlay.py                        the student's functions, laid over the reference
    running.py                        what to run next, and what is known so far
    sandbox.py, inside.py             processes that look, and report what they have seen
    expected.py                       what the reference gives; kept, for it takes half of the time
    judge.py                          compares the two, and says what is wrong and why
    report.py                         the table, and Gradescope's results.json

A check has no expected values in it. It is run twice, once with the reference and once with the
student's functions, and the two reports are compared, in a process that runs no student's code.
"""

import sys

from minifsdp.sim.cli.terminal import begin

begin(program=sys.argv[0] == "-m")  # which is just being found

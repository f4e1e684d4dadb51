"""A run to look at.

spans.py      who was busy when
pieces.py     the same by units, and what each waits for
svg.py        a sheet to draw on
timeline.py   pictures
frames.py     which lines of the program asked for memory
trace.py      files for other people's viewers
html.py       one page to look around in; its script is viewer.html
"""

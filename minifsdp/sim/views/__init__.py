"""A run to look at.

spans.py       who was busy when; and for a terminal
pieces.py      the same by units, and what each waits for
svg.py         a sheet to draw on
lanes.py       who was busy when, drawn
memory_plot.py the memory below that
timeline.py    pictures of one step, of several, and a table of small ones
frames.py      which lines of the program asked for memory
trace.py       files for other people's viewers
html.py        one page to look around in; its script is viewer.html
"""

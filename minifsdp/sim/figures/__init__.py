"""A run in figures.

words.py           figures as they are printed
memory_report.py   what the memory is, when there is most of it
throughput.py      tokens and flops a second
likely.py          in which range a speed probably is
report.py          times, and all of the others
advice.py          one sentence on what would help most
"""

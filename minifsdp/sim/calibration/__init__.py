"""Constants of a cluster from what it does: ``python -m minifsdp.sim calibrate``.

fit.py          constants from samples of how long things take
timing.py       how long something takes on a device
kernels.py      samples of products, attention, passes, copies
collectives.py  samples of collectives, alone and beside products
host.py         samples of what the host takes to ask for work
ranks.py        one process for each device of this machine
profiles.py     samples from a profile that torch has exported
machine.py      all of it: samples in, a GPU and its cluster out
"""

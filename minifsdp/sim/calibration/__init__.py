"""Constants of a cluster from what it does: ``minifsdp calibrate``.

fit.py          constants from samples of how long things take
machine.py      all samples in; a GPU, and what is around it, out
timing.py       how long something takes on a device
kernels.py      samples of products, attention, passes and copies
collectives.py  samples of collectives, alone and beside products
host.py         samples of what the host takes
ranks.py        one process for each device of this machine, to take them
profiles.py     samples from a profile that torch has exported
"""

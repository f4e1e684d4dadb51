"""Measurements.

`make bench` (engine.py), `make bench-check` (check.py):
    models.py         what is trained
    contenders.py     by whom: minifsdp, DDP, FSDP1, FSDP2
    steps.py          on all ranks, taking turns
    meters.py         what is read off, with tensor_memory.c
    net.py            a slow link between ranks, with delay.py, which makes it a long one
    slow_links.py     a table of several links, each for a few contenders
    host.py           what the engine itself takes
    without.py        and what of that its promises take
    limited.py        who trains where a rank has only so much memory
    report.py         the table and the picture
`make bench-checkpoints` (checkpoints.py): saving and loading
By `python -m`: optimizers.py, steps of optimizers; start.py, what comes before the first step;
    one_gpu.py, contenders on a real GPU, with a modelled network
`make validate`: the virtual GPU against a real one (gpu.py), or against CPUs (cpu.py)
"""

"""What a machine's parts take: streams, kernels, wires.

clock.py         a host that launches work, and streams that do it later
gpus.py          what GPUs can do
kernels.py       what an operator asks of a GPU
collectives.py   what a collective over several nodes takes
costs.py         what things take, and what crosses which wire
fusion.py        passes that torch.compile makes one kernel of
cluster_file.py  constants of the user's own machine, in a file
attention.py     which kernel a GPU would run for attention
"""

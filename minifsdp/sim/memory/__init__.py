"""PyTorch's caching allocator: why reserved memory is not allocated memory.

alloc_conf.py      options, as PYTORCH_ALLOC_CONF takes them
blocks.py          pieces of memory, and their levels
free_blocks.py     which free block is given out
segments.py        segments that grow
out_of_memory.py   the error, and what it says
allocator.py       all of it: what is reserved, given out and given back
snapshots.py       what was in memory at the peak, from a file of torch's or ours
"""

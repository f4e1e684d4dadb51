"""How ranks communicate.

collectives.py      all-gather, reduce-scatter and all-reduce on CPUs, by direct messages
unit_messages.py    how a unit's tensors travel: by collectives.py, or by torch's own
transport.py        what carries a message: gloo, or memory that the other rank reads
same_machine.py     ranks on one machine read each other's memory
boards.py           what a rank tells one other rank there, in memory that outlives either
process_memory.py   reads the memory of another process
neighbors.py        finds out which ranks are on one machine
pieces.py           a gradient that is sent from where autograd has left it
blocks.py           where the blocks of each rank are in a tensor that all ranks have
redistribute.py     from one way to divide a tensor among ranks to another
groups.py           which ranks shard and which replicate: a strategy is two groups and a bit
message_tags.py     a number for each message, so that messages are not mistaken for each other
consensus.py        how ranks compare what they have, and come to the same result
wait_reports.py     what a waiting rank reports, and which ranks are in a deadlock
deadlock_watch.py   the thread that finds deadlocks and ends them with an error
"""

"""What ranks say to each other.

collectives.py      all-gather, reduce-scatter, all-reduce: the only calls of torch.distributed
groups.py           who shares parameters with whom: a strategy is two groups and a bit
message_tags.py     which message is which
store.py            short messages, through the store of the process group
wait_reports.py     what a rank says while it waits, and the proof that it waits in vain
deadlock_watch.py   the thread that looks for that proof, and ends the wait
"""

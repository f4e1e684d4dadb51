"""What ranks say to each other.

collectives.py is what the engine calls. The other files serve it: who talks to whom (groups.py),
which message is which (message_tags.py), short messages through the process group's store
(store.py), and the proof that ranks wait for each other in vain (wait_reports.py,
deadlock_watch.py).
"""

"""What the concepts stand on: autograd, and parameters as modules and optimizers see them.

flat_parameter.py      the sharded flat parameter, which the optimizer sees
unsharded_storage.py   the unsharded one, whose memory comes and goes
param_access.py        what a module finds in the place of a parameter
param_views.py         which of these it finds when: views while unsharded, placeholders otherwise
saved_tensors.py       what autograd saves of parameters: a note instead of their memory
autograd_hooks.py      how to act in the middle of a backward
grad_hooks.py          hooks that users put on parameters
prefetch_stats.py      how many prefetches there were, and how many had the wrong target
buffers.py             what a module keeps that is not a parameter
pytree.py              the tensors in whatever a module takes or returns
fingerprint.py         a number for values, to compare them without sending them
"""

"""What features stand on: parameters as modules and optimizers see them, and what is saved of them.

divided_param.py       the DTensors that an optimizer sees of a unit in rows, and the tensor behind
dtensors.py            how such DTensors are made
unsharded_storage.py   unsharded flat parameters, one for each dtype, of which others may have views
freed_memory.py        why the memory that a step frees stays with the process, on a CPU
shard_changes.py       what a program does to shards between steps, taken over at the next step
tensor_attribute.py    where a module has a parameter or a buffer
param_access.py        what a module finds where it had a parameter: a view or a placeholder
piece_views.py         views to compute with, whose gradients stay where autograd has left them
marked_views.py        views of units in rows, which tell which parameters have no gradient
tensor_parallel.py     parameters that are DTensors on another mesh already
param_views.py         when a module finds which: views while unsharded, placeholders while sharded
saved_tensors.py       what autograd saves of parameters: where to find them, not their memory
broken_backward.py     an exception that ends a backward, noticed at once
grad_hooks.py          the gradient hooks that users register on flat parameters
listed_modules.py      several modules as one unit, as fully_shard([a, b]) makes them
several_forwards.py    several forwards before one backward, which frees units after each of them
held_gradients.py      gradients that are not reduced as long as somebody has a reason to wait
stats.py               what a root has done: gathers, reductions, prefetches, and its peak memory
prefetch_stats.py      how many prefetches had the wrong target
buffers.py             the tensors of a module that are not parameters
pytree.py              what a module takes or returns, with its tensors replaced
fingerprint.py         a number that stands for values, to compare these without sending them
"""

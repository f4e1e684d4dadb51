"""What flat parameters cost: all of this exists only because a unit may be cut in chunks.

A chunk is a piece of a unit, cut without regard to where parameters begin (core/shard.py). Chunks
are fast, and the default; but no program sees whole parameters, or their names. Rows (rows.py) need
little of this, mostly what gives both layouts one form of checkpoints.

layout.py              where the chunks of a unit are
flat_parameter.py      the sharded flat parameter, which the optimizer sees
param_attributes.py    what a program has set on its parameters, after wrapping
optimizers.py          which optimizers are right for sharded parameters
param_names.py         names of parameters, for programs that choose by them
optim_state.py         the state of an optimizer belongs to one rank's chunks
boxes.py               what a chunk has of each parameter, to be saved and loaded where it lies
grad_scaler.py         gradient scaling for fp16, with the same decisions on all ranks
as_dtensors.py         a model and its optimizers, in the form of a checkpoint
optimizer_dtensors.py  the states of an optimizer in this form
unit_dtensors.py       the parameters of one unit in this form
"""

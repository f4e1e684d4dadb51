"""What users do between steps.

idle.py               what is done before control returns to the program
full_params.py        read and set unsharded parameters
unit_params.py        those of one unit, as ordinary parameters
state_dict.py         save and load the model as if it were not sharded
state_dict_type.py    whether state dicts have whole tensors or DTensors
optim_state_dict.py   state dicts of optimizers
local_optim_state.py  what this rank's optimizer loads of them
older_optim_state.py  the same by the names that torch had before
state_dict_methods.py both, as methods
checkpoint_state.py   what torch.distributed.checkpoint saves of them, and loads
checksums.py          whether it is what was saved
checkpoint_calls.py   what torch.distributed.checkpoint does with a state dict
state_dict_calls.py   calls of state_dict() that an exception has ended
clip_grad.py          clip by the norm of all gradients
local_params.py       element-wise optimizers that compute with local tensors
explain.py            the units of a model, in a table
comm_hooks.py         other ways to average gradients over ranks
"""

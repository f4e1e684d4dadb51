"""What users do between steps.

full_params.py        read and set unsharded parameters
unit_params.py        those of one unit, as ordinary parameters
state_dict.py         save and load the model as if it were not sharded
state_dict_calls.py   calls of state_dict() that an exception has ended
clip_grad.py          clip by the norm of all gradients
explain.py            the units of a model, in a table
grad_scaler.py        scale gradients in fp16, the same on all ranks
"""

"""What users do between steps.

full_params.py        read and set whole parameters
unit_params.py        one unit's, while they are out
state_dict.py         save and load the model as if it were not sharded
state_dict_calls.py   calls of state_dict() that an exception has ended
clip_grad.py          clip by the norm of all gradients
grad_scaler.py        scale for fp16, in step on all ranks
"""

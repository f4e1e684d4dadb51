"""Mistakes that would go unnoticed, or would end in a deadlock, refused early and by name.

In a step three files do something: the ranks exchange one small message for each backward
(rank_agreement.py; more in the first steps), an optimizer compares its parameter groups with those
of its last step (optimizers.py), and a backward refuses parameters that were changed since its
forward (param_changes.py). The rest runs when a model is wrapped or changed, before its first
step, or when an optimizer is built or loaded.

rank_agreement.py     all ranks run the same units in the same order; what happens if they do not
same_launches.py      and start the same collectives, where these have no tags
agreement_groups.py   which ranks have to agree on which units
same_model.py         all ranks have wrapped the same model, with the same values
held_values.py        values of parameters that a model has in a second place, where they would part
members.py            the modules and parameters of a unit cannot be replaced
first_step.py         what is looked for before a model's first step is over, and then no more
param_changes.py      what must not be done to parameters around a forward and its backward
params_in_graphs.py   sharded parameters in a graph of autograd, where unsharded ones belong
other_wrappers.py     other wrappers around a sharded model, or inside of it
misplaced_calls.py    calls that are right, but not on this wrapper or not now
unsupported.py        what torch's FSDP has and minifsdp does not
"""

"""Mistakes that would go unnoticed, or would end in a deadlock, refused early and by name.

In a step these checks cost a few comparisons on the host, and one small message between the ranks
for each backward (rank_agreement.py; more in the first steps). same_model.py, held_values.py,
first_step.py, other_wrappers.py and unsupported.py do nothing in a step: they run when a model is
wrapped, before its first step, or when its values have been set.

rank_agreement.py     all ranks run the same units in the same order; what happens if they do not
same_launches.py      and start the same collectives, where these have no tags
agreement_groups.py   which ranks have to agree on which units
same_model.py         all ranks have wrapped the same model, with the same values
held_values.py        second copies of a model's parameters, which would keep old values
members.py            the modules and parameters of a unit cannot be replaced
first_step.py         checks that run only until a model's first forward is over
param_changes.py      what must not be done to parameters around a forward and its backward
params_in_graphs.py   sharded parameters in a graph of autograd, where unsharded ones belong
other_wrappers.py     other wrappers around a sharded model, or inside of it
misplaced_calls.py    calls that are right, but not on this wrapper or not now
unsupported.py        what torch's FSDP has and minifsdp does not
"""

"""Mistakes that would otherwise go unnoticed, found early and refused by name.

The concepts at the top can be read without any of it.

rank_agreement.py   all ranks run the same units in the same order; what happens if not
rank_circles.py     which ranks have to agree on which units
same_model.py       all ranks have wrapped the same model, with the same values
optimizers.py       which optimizers are right for shards
optim_state.py      the state of an optimizer belongs to one shard
members.py          the modules of a unit stay in it
param_names.py      parameters are not chosen by names that they no longer have
other_wrappers.py   other wrappers around a sharded model, or inside
unsupported.py      what torch's FSDP has and minifsdp has not
"""

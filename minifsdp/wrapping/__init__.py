"""From a module to units, once, before the first step. To follow a step you need none of this.

policies.py       which modules become units: the policies of torch.distributed.fsdp.wrap
auto_wrap.py      asks a policy, and checks that no parameter would be in two units
module_tree.py    names, and which modules and parameters belong to which wrapper
ignored.py        modules and parameters that a wrapper leaves alone
orig_params.py    parameters as they were before wrapping, which nothing should refer to any more
materialize.py    memory and values for parameters: meta device, moves, rank 0's values
settings.py       the arguments of one wrapper that decide how its unit is built
fsdp2_settings.py the arguments of fully_shard, in the words of settings.py
shard_placement.py  the dimension along which a parameter is divided, if it is not the first
root_settings.py  the arguments that decide how a step runs: limit and prefetching
torch_names.py    torch's own enums, records and policies, translated to minifsdp's
build.py          puts a unit together
attributes.py     a wrapper looks like the module that it wraps
torch_attributes.py  attributes of torch's wrapper that scripts read
compiled.py       torch.compile compiles the modules, and not the engine
"""

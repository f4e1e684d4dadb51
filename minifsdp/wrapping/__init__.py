"""From a module to units, once, before the first step. A reader of the step can skip all of it.

policies.py       which modules become units: the policies of torch.distributed.fsdp.wrap
auto_wrap.py      asks a policy, and checks that no parameter would be in two units
module_tree.py    names, and what belongs to which wrapper
orig_params.py    parameters as they were before wrapping: nobody should hold them any more
materialize.py    memory and values for parameters: meta device, moves, rank 0's values
settings.py       what the arguments of one wrapper mean for its unit
torch_names.py    torch's own enums, records and policies, as minifsdp's
build.py          puts a unit together
attributes.py     a wrapper looks like the module that it wraps
compiled.py       torch.compile sees the modules, and not the engine
"""

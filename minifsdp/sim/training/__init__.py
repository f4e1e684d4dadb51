"""What is trained, and how.

sizes.py        the sizes of published models
models.py       models to try
llama.py        Llama, as torchtitan's
plain.py        how to train a plain module
presets.py      what --model takes: a name, yours, and others'
optimizers.py   optimizers, with states of 8 and 16 bits
fused.py        a Llama's parts in one kernel each
offload_activations.py   what the forward keeps, on the host
recompute.py    which activations are computed again
wrapped.py      a model as FSDP wraps it, with all settings
fsdp2.py        FSDP2's way to gather ahead, to compare with
history.py      FSDP1's and fairscale's
ordered.py      one with PyTorch's time and the memory of two units
"""

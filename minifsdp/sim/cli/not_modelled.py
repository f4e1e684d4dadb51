"""What somebody may ask for by its name, and what is not modelled: each with what it is."""

PARALLELISM = {
    ("tp", "tensor-parallel", "tensor-parallelism", "tensor-parallel-size"): (
        "tensor parallelism cuts each matrix product over several GPUs"
    ),
    ("sp", "sequence-parallel", "sequence-parallelism"): (
        "sequence parallelism cuts what is between the products of tensor parallelism by tokens"
    ),
    ("cp", "context-parallel", "context-parallelism", "context-parallel-size"): (
        "context parallelism cuts each text over several GPUs, which send keys and values around"
    ),
    ("pp", "pipeline-parallel", "pipeline-parallelism", "pipeline-parallel-size"): (
        "pipeline parallelism gives each GPU some of the layers, through which batches travel"
    ),
    ("ep", "expert-parallel", "expert-parallelism", "expert-parallel-size"): (
        "expert parallelism gives each GPU some experts of a mixture, to which tokens travel"
    ),
}
FP8 = (
    "fp8 computes products of numbers of 8 bits, with a scale for each tensor or row; that is not "
    "modelled: give bf16"
)


def check_modelled(option: str) -> None:
    """Refuse an option that is known elsewhere, and not here.

    Args:
        option: as typed, with its dashes.

    Raises:
        ValueError: says what it is.
    """
    name = option.lstrip("-").replace("_", "-").lower()
    for names, what in PARALLELISM.items():
        if name in names:
            raise ValueError(
                f"{option}: {what}; that is not modelled. Here all GPUs share each model by FSDP: "
                f"--strategy says how"
            )
    if name in ("fp8", "float8"):
        raise ValueError(f"{option}: {FP8}")

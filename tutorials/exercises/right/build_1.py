"""Goes over all modules by their paths, and finds the innermost unit by the longest path."""


def fsdp(model: nn.Module, *kinds: type[nn.Module]) -> "Engine":
    paths = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
    paths[""] = model
    units: dict[str, dict[nn.Parameter, Owners]] = {}
    for path, module in model.named_modules():
        around = [p for p in paths if not p or f"{path}.".startswith(f"{p}.")]
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            unit = units.setdefault(max(around, key=len), {})
            unit[param] = unit.get(param, set()) | {(module, name)}
    return Engine(model, [Unit(paths[path], params) for path, params in units.items()])

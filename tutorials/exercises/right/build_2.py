"""Writes each parameter to its place in zeros, and cuts by a slice."""


class Unit:
    def __init__(self, module: nn.Module, params: dict[nn.Parameter, Owners]) -> None:
        self.module, self.world = module, dist.get_world_size()
        self.owners, self.shapes = list(params.values()), [param.shape for param in params]
        first = next(iter(params))
        size = -(-sum(param.numel() for param in params) // self.world)
        flat, at = first.new_zeros(size * self.world, requires_grad=False), 0
        for param in params:
            flat[at : at + param.numel()] = param.data.reshape(-1)
            at += param.numel()
        for owner, name in (pair for owners in self.owners for pair in owners):
            del owner._parameters[name]
        begin = size * dist.get_rank()
        module.sharded_flat_param = nn.Parameter(flat[begin : begin + size].clone())
        self.sharded_flat_param = module.sharded_flat_param
        self.flat_param = flat.requires_grad_()
        self.reshard()

"""Divides in place, and adds in place."""


class Engine:
    def before_backward(self, unit: Unit, grad: Tensor) -> None:
        if not unit.flat_param.untyped_storage().nbytes():
            unit.unshard()

    def after_gradient(self, unit: Unit, flat_param: Tensor) -> None:
        sent = flat_param.grad.div_(unit.world)
        flat_param.grad = None
        unit.reshard()
        mean = sent.new_empty(unit.sharded_flat_param.numel())
        torch_reduce_scatter(mean, sent)
        if unit.sharded_flat_param.grad is None:
            unit.sharded_flat_param.grad = mean
        else:
            unit.sharded_flat_param.grad.add_(mean)

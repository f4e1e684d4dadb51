"""Hooks that are functions of their own, and one for all inputs of the backward."""


class Engine:
    def __init__(self, model: nn.Module, units: list[Unit]) -> None:
        self.model, self.units = model, units
        for unit in units:
            self.listen(unit)

    def listen(self, unit: Unit) -> None:
        unit.module.register_forward_pre_hook(lambda *args: self.before_forward(unit, *args))
        unit.module.register_forward_hook(lambda *args: self.after_forward(unit, *args))
        unit.flat_param.register_post_accumulate_grad_hook(
            lambda flat_param: self.after_gradient(unit, flat_param)
        )

    def before_forward(self, unit: Unit, module: nn.Module, args: Any) -> None:
        unit.unshard()
        unit.show_views()

    def after_forward(self, unit: Unit, module: nn.Module, args: Any, output: Tensor) -> None:
        unit.reshard()
        unit.hide_views()
        if output.grad_fn is not None:
            output.grad_fn.register_prehook(lambda grads: self.before_backward(unit, grads[0]))

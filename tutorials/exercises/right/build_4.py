"""Narrows instead of splitting, and goes around nn.Module's own setattr()."""


class Unit:
    def unflatten(self, flat: Tensor) -> Iterator[Tensor]:
        at = 0
        for shape in self.shapes:
            yield flat.narrow(0, at, shape.numel()).reshape(shape)
            at += shape.numel()

    def show_views(self) -> None:
        for view, owners in zip(self.unflatten(self.flat_param), self.owners, strict=True):
            for owner, name in owners:
                owner._parameters.pop(name, None)
                owner.__dict__[name] = view

    def hide_views(self) -> None:
        for owners in self.owners:
            for owner, name in owners:
                owner._parameters.pop(name, None)
                owner.__dict__.pop(name, None)

"""Gathers into a list of pieces."""


class Engine:
    def full_params(self) -> dict[str, Tensor]:
        found = {}
        for unit in self.units:
            shard = unit.sharded_flat_param.detach()
            pieces = [torch.empty_like(shard) for _ in range(unit.world)]
            dist.all_gather(pieces, shard)
            views = list(unit.unflatten(torch.cat(pieces)))
            for path, module in self.model.named_modules():
                for view, owners in zip(views, unit.owners, strict=True):
                    for name in (name for owner, name in owners if owner is module):
                        found[f"{path}.{name}" if path else name] = view.clone()
        return found

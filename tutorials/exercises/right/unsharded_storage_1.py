"""Right: it counts views one by one, and new tensors take the place of old ones."""


class FeaturedFlatParam(FeaturedFlatParam):
    def is_in_use(self, views: list[Tensor]) -> bool:
        if any(count > _ONE_REFERENCE for count in map(sys.getrefcount, views)):
            return True
        parts = [local_of(view) for view in views if isinstance(view, DTensor)]
        if any(count > _ONE_REFERENCE + 1 for count in map(sys.getrefcount, parts)):
            return True
        own = 3 + len(views)
        if self.frozen is not None:
            own += 1
        return torch._C._storage_Use_Count(self.storage._cdata) > own

    def release(self, views: list[Tensor]) -> bool:
        if in_use := self.is_in_use(views):
            new = torch.empty_like(self.data)
            self.flat_param.data = new[: self.flat_param.numel()].data
            if self.frozen is not None:
                self.frozen = new[self.flat_param.numel() :].data
            self.data = new
            self.storage = self.data.untyped_storage()
        self.free()
        return not in_use

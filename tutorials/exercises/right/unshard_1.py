"""Casts before it submits, and chooses among three ways to launch."""


def unshard(unit, streams):
    unit.state.start_unshard()
    fetch = upload(unit.padded_shard, streams, unit.label) if unit.offload_from else None
    flat = unit.unsharded

    def start():
        return unit.padded_shard if fetch is None else fetch()

    def gather():
        flat.allocate()
        return all_gather(flat.data, start().to(flat.dtype), unit.shard_group, unit.tag, unit.label)

    def copy():
        flat.allocate()
        flat.data.copy_(start())
        return lambda: None

    launch = gather if unit.shard_group is not None else copy
    unit.unshard_event = streams.unshard.submit(launch, "my gather")

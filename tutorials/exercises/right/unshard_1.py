"""Asks the source where it submits, and chooses among two ways to launch."""


def unshard(unit, streams):
    unit.state.start_unshard()
    unit.source.prepare(unit, streams)
    flat, group = unit.unsharded, unit.source.group

    def gather():
        flat.allocate()
        sent = unit.source.tensor(unit, streams)
        return unit.comm.all_gather(unit, flat.data, sent, group)

    def copy():
        flat.allocate()
        flat.data.copy_(unit.source.tensor(unit, streams))
        return lambda: None

    launch = gather if group is not None else copy
    unit.unshard_event = streams.unshard.submit(launch, "my gather")

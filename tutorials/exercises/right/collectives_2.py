"""Scales what it has received in a loop of its own, then adds; slower."""


def reduce_scatter(flat, group, scale, tag, label="", kind=Kind.REDUCTION, blocks=None, sizes=None):
    from minifsdp.comm.pieces import whole

    flat = whole(flat)
    message = Message(group, tag, kind, flat.itemsize, label)
    chunks = list(flat.tensor_split(group.size()))
    rank, size = group.rank(), group.size()
    got, works = {}, []
    for other in range(size):
        if other != rank:
            got[other] = torch.empty_like(chunks[rank])
            works.append(group.recv([got[other]], other, message.tag))
            works.append(group.send([chunks[other]], other, message.tag))
    total = torch.zeros_like(chunks[rank])
    wait = wait_for(works, message)

    def finish():
        wait()
        order = [(rank - distance) % size for distance in range(1, size)]
        parts = [got[other] * scale for other in order] + [chunks[rank] * scale]
        result = parts[0]
        for part in parts[1:]:
            result = result + part
        total.copy_(result)

    return total, finish

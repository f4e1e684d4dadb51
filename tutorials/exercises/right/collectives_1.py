"""Receives into tensors of its own, and copies them at the end; slower."""


def all_gather(full, chunk, group, tag, label="", kind=Kind.PARAMETERS, blocks=None):
    message = Message(group, tag, kind, full.itemsize, label)
    mine = chunk.clone()
    received = {group.rank(): mine}
    works = []
    for rank in range(group.size()):
        if rank != group.rank():
            received[rank] = torch.empty_like(full.tensor_split(group.size())[rank])
            works += [
                group.recv([received[rank]], rank, message.tag),
                group.send([mine], rank, message.tag),
            ]
    wait = wait_for(works, message)

    def finish():
        wait()
        full.copy_(torch.cat([received[rank] for rank in range(group.size())]))

    return finish

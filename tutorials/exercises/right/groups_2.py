"""Columns by counting, groups in another order, and nothing is cached."""

from typing import Any

import torch.distributed as dist


def groups_by_host(group: Any) -> tuple[Any, Any]:
    ranks, hosts = dist.get_process_group_ranks(group), hosts_of(group)
    rows = [
        [r for r, h in zip(ranks, hosts, strict=True) if h == host] for host in sorted(set(hosts))
    ]
    length = len(rows[0])
    if any(len(row) != length for row in rows):
        raise ValueError(f"each host needs {length} ranks")
    found: dict[str, Any] = {}
    for k in range(length):
        line = sorted(row[k] for row in rows)
        made = dist.new_group(line)
        if dist.get_rank() in line:
            found["column"] = made
    for line in rows:
        made = dist.new_group(line)
        if dist.get_rank() in line:
            found["row"] = made
    return found["row"], found["column"]

"""sim/calibration/host.py: what the host takes."""

import torch

from minifsdp.sim.calibration import host

CPU = torch.device("cpu")
GROUP = object()  # of all ranks, which do it together


def test_a_steps_time_is_shared_out_among_its_kernels(monkeypatch):
    done = []

    def seconds(work, here, group) -> float:
        assert group is GROUP
        done.append(work())
        return 3.0

    monkeypatch.setattr(host, "seconds", seconds)
    launch = host.launch(CPU, GROUP)
    kernels = 3.0 / launch
    # A layer forward and backward has about fifty, the optimizer a dozen for all of them.
    assert 30 * host.LAYERS < kernels < 80 * host.LAYERS and len(done) == 1


def test_memory_is_read_and_written(monkeypatch):
    monkeypatch.setattr(host, "seconds", lambda work, here, group: 2.0 if group is GROUP else 0.0)
    assert host.bandwidth(GROUP) == 4 * 2**24

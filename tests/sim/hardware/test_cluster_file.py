"""sim/hardware/cluster_file.py: constants of one's own machine, in a file."""

import json
from dataclasses import fields, replace

import pytest

from minifsdp import __version__
from minifsdp.sim.hardware.cluster_file import BETWEEN, CLUSTER, FORMAT, content, read
from minifsdp.sim.hardware.costs import Cluster
from minifsdp.sim.hardware.gpus import GPUS, Gpu

GPU = GPUS["h100"]
CONSTANTS = {name: getattr(Cluster(GPU), name) for name in CLUSTER}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "cluster.json"
    path.write_text(content(GPU, CONSTANTS, "a test"))
    return path


def test_what_is_written_is_read(file):
    assert read(file) == (GPU, CONSTANTS)
    found = json.loads(file.read_text())
    assert (found["format"], found["minifsdp"]) == (FORMAT, __version__)
    assert found["about"] == "a test"


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_every_preset_can_be_in_a_file(gpu, tmp_path):
    (tmp_path / "file").write_text(content(gpu, CONSTANTS, ""))
    assert read(tmp_path / "file")[0] == gpu


def test_what_takes_no_time_may_be_zero(tmp_path):
    """As on CPUs, which have no kernels to launch and no memory to map."""
    nothing = dict.fromkeys(("taken", "kernel", "launch", "moment", "cuda_malloc"), 0)
    gpu = replace(GPU, tile_overhead=0.0, row_overhead=0)
    (tmp_path / "file").write_text(content(gpu, {**CONSTANTS, **nothing}, ""))
    assert read(tmp_path / "file") == (gpu, {**CONSTANTS, **nothing})


def test_what_is_between_nodes_may_be_there(tmp_path):
    between = {name: getattr(Cluster(GPU, nodes=3), name) for name in BETWEEN}
    path = tmp_path / "file"
    path.write_text(content(GPU, {**CONSTANTS, **between}, ""))
    assert read(path) == (GPU, {**CONSTANTS, **between}) and between["nodes"] == 3


def test_constants_are_a_clusters():
    assert {*CLUSTER, *BETWEEN} < {field.name for field in fields(Cluster)}


CHANGED = [
    ("format", 1, "is of format 1, and this is 2; calibrate again"),
    ("format", "2", "is of format '2', and this is 2"),
    ("minifsdp", "0.0.9", "is of minifsdp '0.0.9', and this is"),
    ("gpu", None, "has no 'gpu' with constants in it"),
    ("cluster", [1], "has no 'cluster' with constants in it"),
    ("gpu.flops", "fast", "gpu.flops should be a number above 0, and is 'fast'"),
    ("gpu.flops", 0, "gpu.flops should be a number above 0, and is 0"),
    ("gpu.flops", -1.0, "gpu.flops should be a number above 0, and is -1.0"),
    ("gpu.flops", float("nan"), "gpu.flops should be a number above 0, and is nan"),
    ("gpu.bandwidth", float("inf"), "gpu.bandwidth should be a number above 0, and is inf"),
    ("gpu.passes", True, "gpu.passes should be a number above 0, and is True"),
    ("gpu.memory", 1.5, "gpu.memory should be a whole number above 0, and is 1.5"),
    ("gpu.name", 7, "gpu.name should be a name, and is 7"),
    ("gpu.prefers_cudnn", 1, "gpu.prefers_cudnn should be true or false, and is 1"),
    ("gpu.colour", 1, "has gpu.colour, which is not known"),
    ("cluster.launch", -1e-6, "cluster.launch should be a number of at least 0, and is -1e-06"),
    ("cluster.host_computes", 0, "cluster.host_computes should be true or false, and is 0"),
    ("cluster.beside_collectives", 1.1, "should be a number above 0 and at most 1, and is 1.1"),
    ("cluster.nodes", 1.5, "cluster.nodes should be a whole number above 0, and is 1.5"),
    ("cluster.network", 0, "cluster.network should be a number above 0, and is 0"),
    ("cluster.gpus_per_node", 0, "gpus_per_node should be a whole number above 0, and is 0"),
]


@pytest.mark.parametrize("field, value, message", CHANGED)
def test_what_makes_no_sense_is_refused(field, value, message, file):
    found = json.loads(file.read_text())
    part, _, name = field.partition(".")
    if name:
        found[part][name] = value
    else:
        found[part] = value
    file.write_text(json.dumps(found))
    with pytest.raises(ValueError) as error:
        read(file)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "part, names", [("gpu", [f.name for f in fields(Gpu)]), ("cluster", CLUSTER)]
)
def test_no_field_may_be_missing(part, names, file):
    for name in names:
        found = json.loads(file.read_text())
        del found[part][name]
        other = file.with_name("other")
        other.write_text(json.dumps(found))
        with pytest.raises(ValueError, match=f"lacks {part}.{name}; calibrate again"):
            read(other)


@pytest.mark.parametrize("text", [b"", b"no", b"\x80\x04]", b"[1]", b"{}", b"null", b"[" * 100_000])
def test_another_file_is_refused(text, tmp_path):
    (tmp_path / "file").write_bytes(text)
    with pytest.raises(ValueError, match=r"'.*file' is no (JSON|cluster file)") as error:
        read(tmp_path / "file")
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there_is_said(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read .*: No such file.*calibrate -o FILE"):
        read(tmp_path / "file")
    with pytest.raises(ValueError, match=r"cannot read .*: Is a directory"):
        read(tmp_path)

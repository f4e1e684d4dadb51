"""bench/: that `make bench` counts what it says it counts, and finds what is wrong or too much. How
fast anything is, is not asked here.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.bench import check, engine, limited, net, slow_links
from tests.bench.contenders import CONTENDERS, HYBRID, MEANWHILE, PLAIN
from tests.bench.host import over_local
from tests.bench.meters import build_counter
from tests.bench.models import WORKLOADS
from tests.bench.report import MIB, ideal_seconds, median, perfect_seconds, ratio, table
from tests.bench.steps import check_losses, measured
from tests.patience import run_command
from tests.ranks import on_ranks
from tutorials.train_gpt import GPT, Block

READINGS = {
    "local": {"readings": [(1.0, 1.0, 0, 0), (4.0, 1.0, 0, 0), (1.0, 1.0, 0, 0)]},
    "mini": {
        "readings": [(2.0, 1.5, 2**21, 10), (4.0, 1.5, 2**21, 10), (3.0, 1.5, 2**21, 10)],
        "tensors": 3 * 2**20,
        "resident": 2**20,
    },
}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="counts a CPU's tensors")
def test_all_contenders_train_alike_and_send_what_they_should():
    """The model of `make demo`. Bytes do not depend on how busy a machine is, nor does memory."""
    found = measured("tiny", list(CONTENDERS), ranks=2, rounds=1, counts=False)
    whole = WORKLOADS["tiny"].nbytes
    sent = {name: median(found, name, 2) / (whole / 2) for name in found}
    assert sent["local"] < 0.05  # barriers
    for name, times in {
        "DDP": 2, "FSDP1 grad_op": 3, "FSDP2": 4, "mini": 3, "mini grad_op": 2, "mini no_shard": 2,
        "messages": 3, "messages grad_op": 2, "meanwhile": 3, "meanwhile grad_op": 2,
    }.items():  # fmt: skip
        assert times * 0.85 < sent[name] < times * 1.1, (name, sent[name])
    assert sent["messages"] == pytest.approx(sent["mini"], rel=0.01)
    assert sent["messages grad_op"] == pytest.approx(sent["mini grad_op"], rel=0.01)
    rows = table(found, "tiny", 2, 0).splitlines()
    assert [row.partition("  ")[0] for row in rows[1:]] == list(CONTENDERS)


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--bf16", "--offload"])
def test_other_settings_run(option):
    """Of those that have the setting one each; what does not train raises."""
    options = engine.parser().parse_args([option, "--only", *CONTENDERS])
    names = [name for name in engine.names_of(options) if name in ("FSDP1", "FSDP2", "mini")]
    given = {"bf16": options.bf16, "offload": options.offload}
    assert list(measured("tiny", names, 2, 1, counts=False, **given)) == names


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="counts a CPU's tensors")
def test_memory_is_counted_of_each_contender_alone():
    found, whole = measured("tiny", ["local", "DDP", "mini"], 2, 1), WORKLOADS["tiny"].nbytes
    tensors = {name: each["tensors"] / whole for name, each in found.items()}
    assert tensors["DDP"] - tensors["local"] == pytest.approx(1, abs=0.1)  # its buckets
    assert tensors["mini"] < tensors["local"] - 0.2  # half of the parameters, and a unit


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="limits a CPU's memory")
def test_minifsdp_trains_within_a_limit_that_ddp_runs_into():
    """34 M parameters take DDP 513 MiB with AdamW, and each of two ranks 257 if they are sharded.
    Units come on top, and some tens of MiB for gloo and threads."""
    limit = 490 * MIB
    assert not limited.missing(2, limit)
    found = limited.compared("comm", ["DDP bucket view", "mini prefetch"], 2, limit)
    ddp, mini = found.values()
    assert limited.REFUSED in ddp["error"] and ddp["at"] == "AdamW's step 1"
    assert not mini["error"] and len(mini["losses"]) == limited.STEPS
    if "tensors" in mini:
        whole = limited.ADAMW * WORKLOADS["comm"].nbytes / 4
        assert ddp["tensors"] == pytest.approx(whole, rel=0.1) and ddp["tensors"] > limit
        assert whole / 2 < mini["tensors"] < 0.6 * whole


def test_a_limit_is_told_with_who_trains_within_it():
    found = {
        "DDP": {
            "error": "refused",
            "at": "AdamW's step 1",
            "resident": 3 * MIB,
            "tensors": 9 * MIB,
        },
        "mini": {"error": "", "at": "", "resident": 2 * MIB},
    }
    title, _, ddp, mini, _ = limited.table(found, "comm", 2, 490 * MIB).splitlines()
    assert title.startswith("a limit of 490 MiB") and title.endswith(": 513 MiB, sharded 257")
    assert "out of memory: AdamW's step 1" in ddp
    assert ddp.split()[-2:] == ["3", "9"] and mini.split() == ["mini", "trains", "2"]


def test_a_machine_without_the_memory_for_it_is_told_so(capsys):
    assert engine.main(["--model", "350m", "--world", "4", "--limit", "999999"]) == 0
    assert "skipped: no limit of 999999 GiB can be set here: 4 ranks may" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        engine.main(["--model", "350m", "--limit", "3", "--bf16"])
    assert "--limit goes with none of" in capsys.readouterr().err


def test_without_arguments_all_three_tables_are_made(monkeypatch):
    made = [engine.parser().parse_args(given) for given in engine.DEFAULT]
    assert [options.model for options in made] == ["comm", "125m", "350m"]
    assert made[1].bf16 and engine.names_of(made[1]) == [*engine.IN_16_BITS]
    given, main = [], engine.main
    monkeypatch.setattr(engine, "main", lambda argv: given.append(argv) or 0)
    assert main([]) == 0 and given == [*engine.DEFAULT]


def test_a_contender_with_another_loss_is_found():
    check_losses({"DDP": [1.0, 2.0], "mini": [1.0, 2.000001]}, bf16=False)
    with pytest.raises(ValueError, match=r"step 1: mini has the loss 2\.1, DDP has 2\.0"):
        check_losses({"DDP": [1.0, 2.0], "mini": [1.0, 2.1]}, bf16=True)
    with pytest.raises(ValueError, match="nan"):
        check_losses({"DDP": [1.0], "mini": [float("nan")]}, bf16=False)


def test_tensors_are_counted_to_the_byte(tmp_path):
    """All threads' ones, also if another thread frees them; not what is no tensor's."""
    library = build_counter(tmp_path)
    if library is None:
        pytest.skip("there is no C compiler")
    code = """
import threading, torch
from tests.bench.meters import Tensors
tensors = Tensors()
first = torch.empty(1000)
tensors.forget_peak()
before = tensors.peak()
second = [torch.empty(100_000)]
worker = threading.Thread(target=lambda: (second.clear(), torch.empty(300_000)))
worker.start(); worker.join()
other = bytearray(10_000_000)
third = torch.empty(50_000)
print(tensors.peak() - before)
tensors.forget_peak()
print(tensors.peak() - before)
"""
    command = ["env", f"LD_PRELOAD={library}", sys.executable, "-W", "ignore", "-c", code]
    result = run_command(command)
    assert result.stdout.split() == ["1200000", "200000"], result.stderr


def test_ratios_are_those_of_rounds():
    """Each round's own: a machine that was busy in a round was so for all."""
    assert ratio(READINGS, "mini", "local")[0] == 2.0
    assert median(READINGS, "mini", 0) == 3.0 and median(READINGS, "mini", 2) == 2**21
    _, local, mini = table(READINGS, "comm", 2, 0).splitlines()
    assert mini.split()[:3] == ["mini", "3000", "2.00"] and local.split()[2] == "1.00"
    assert mini.split()[-4:] == ["2.0", "10", "3.0", "1.0"]


def test_at_best_a_step_takes_as_long_as_computing_or_as_sending():
    seconds = 3 * WORKLOADS["comp"].nbytes / 2 * 8 / 1e9
    assert ideal_seconds("comp", 2, 1000, local=0.1) == seconds > 0.1
    assert ideal_seconds("comp", 2, 1000, local=9.0) == 9.0
    assert ideal_seconds("comp", 2, 0, local=0.1) == 0.1


def test_no_schedule_is_faster_than_its_link_and_its_computation():
    """Of two blocks and a root that are computed in no time, and that are sent in no time."""
    given, rate = WORKLOADS["comp"], 1e6 / 8 * 2  # bytes of parameters in a second, at 1 Mbit/s
    sent = 3 * given.nbytes - (given.nbytes - given.layers * given.block_nbytes)
    assert perfect_seconds("comp", 2, 1, local=0.0, gathers=2) == pytest.approx(sent / rate)
    assert perfect_seconds("comp", 2, 1e12, local=9.0, gathers=2) == pytest.approx(9.0)
    apart = perfect_seconds("comp", 2, 1, local=0.0, gathers=2, apart=True)  # the last block stays
    assert apart == pytest.approx((sent - given.block_nbytes) / rate)
    # A fast link, whose first and last messages have nothing to hide behind.
    ends = 2 * (given.nbytes - given.layers * given.block_nbytes + given.block_nbytes)
    assert perfect_seconds("comp", 2, 1, 1e5, gathers=1) == pytest.approx(1e5 + ends / rate, abs=1)
    # In between it is more than either.
    whole = 2 * given.nbytes / rate
    assert perfect_seconds("comp", 2, 1, local=whole, gathers=1) > 1.2 * whole
    # With latency: two blocks arrive at a time, since two may be unsharded; the root at both ends.
    assert perfect_seconds("comp", 2, 1e12, local=0.0, gathers=2, late=1) == pytest.approx(8)
    # All-reduces between machines, each of which has all parameters: nothing is gathered.
    sent = perfect_seconds("comp", 4, 1, local=0.0, gathers=2, crossing=(0.0, 1.0))
    assert sent == pytest.approx(given.nbytes * 8 / 1e6)
    # What sending takes of the cores comes on top, but for the first messages and the last.
    slower = perfect_seconds("comp", 2, 1e12, local=9.0, gathers=1, sending=1.0)
    hidden = 1 - ends / (2 * given.nbytes)
    assert slower == pytest.approx(9.0 + hidden) and 0.5 < hidden < 0.9
    # Less is before and after it if the embeddings are apart from the head.
    slower = perfect_seconds("comp", 2, 1e12, local=9.0, gathers=1, sending=1.0, apart=True)
    assert slower > 9.0 + hidden
    assert perfect_seconds("comp", 2, 1, 1e5, 1, apart=True) < 1e5 + 0.8 * ends / rate


def test_a_bound_that_is_not_met_fails(monkeypatch, capsys):
    monkeypatch.setattr(check, "RUNS", {("comm", 3, 0): [check.Bound("mini", "local", 2.0)]})
    found = READINGS | {"messages": READINGS["mini"]}
    monkeypatch.setattr(check, "measured", lambda *_, **__: found)
    others = {"FSDP1": [401.0], "mini bare": [71.0], "one file": [51.0]}
    times = {"local": [1.0], "mini": [61.0], **others}
    monkeypatch.setattr(check, "host_times", lambda rounds: times)
    assert check.main() == 0
    times["mini"] = [61.2]
    out = (check.main(), capsys.readouterr().out)
    assert out[0] == 1 and out[1].count("TOO MUCH") == 2
    assert "moments: 70.00;" in out[1] and "one kind of model: 50.00)" in out[1]
    assert "moments: 0.17;" in out[1] and "one kind of model: 0.12)" in out[1]
    monkeypatch.setattr(check, "RUNS", {("comm", 3, 0): [check.Bound("mini", "local", 1.9)]})
    times["mini"] = [61.0]
    assert check.main() == 1 and "and nothing else: 2.00)" in capsys.readouterr().out


def test_bytes_and_memory_have_bounds():
    whole = WORKLOADS["comm"].nbytes / 2
    found = {
        "mini rows keep last": {"readings": [(1.0, 1.0, whole * 2.6, 0)]},
        "mini": {"tensors": 3},
        "mini lean": {"tensors": 2},
        "FSDP1": {"tensors": 4},
    }
    assert check.amounts(found, 2, "comm") == [True, True]
    found["mini"]["tensors"] = 4
    found["mini rows keep last"]["readings"] = [(1.0, 1.0, whole * 3, 0)]
    assert check.amounts(found, 2, "comm") == [False, False]


def test_with_a_setting_that_they_do_not_have_some_are_left_out(capsys):
    options = engine.parser().parse_args(["--bf16"])
    assert not set(engine.names_of(options)) & set(PLAIN)
    assert "without local, messages" in capsys.readouterr().out
    assert any("FSDP1" in name for name in engine.names_of(engine.parser().parse_args(["--bf16"])))
    names = engine.names_of(engine.parser().parse_args(["--offload"]))
    assert any("FSDP1" in name for name in names) == torch.cuda.is_available()
    fast, slow = (
        engine.names_of(engine.parser().parse_args(given)) for given in ([], ["--net", "9"])
    )
    assert set(slow) == set(CONTENDERS) - set(HYBRID) and set(slow) - set(fast) == set(MEANWHILE)


def test_without_root_a_slow_link_is_skipped_with_a_word(monkeypatch, capsys):
    monkeypatch.setattr(net.os, "geteuid", lambda: 1000)
    assert engine.main(["--net", "100"]) == 0
    assert (
        "skipped: no link of 100 Mbit/s can be made here: it takes root" in capsys.readouterr().out
    )


def test_links_are_shaped_and_gone_afterwards():
    why = net.missing()
    if why:
        pytest.skip(why)
    with net.links(2, net.Link(100, buffers=64)):
        for rank in range(2):
            words = ["tc", "-n", net._name(rank), "qdisc", "show", "dev", net.DEVICE]
            shown = subprocess.run(words, capture_output=True, text=True).stdout
            assert "tbf" in shown and "rate 100Mbit" in shown
            for name in "tcp_wmem", "tcp_rmem":
                file = f"/proc/sys/net/ipv4/{name}"
                result = run_command([*net.command(rank), "cat", file])
                *before, _ = Path(file).read_text().split()
                assert result.stdout.split() == [*before, str(64 << 20)]
    there = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert net._name("bridge") not in there and net._name(0) not in there


SERVER = """
import socket
with socket.create_server(("10.77.0.1", 7777)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    got = 0
    while got < 1_000_000:
        got += len(connection.recv(1 << 20))
        if got == 1:
            connection.send(b"x")
    connection.send(b"y")
"""
CLIENT = """
import socket, time
connection = socket.create_connection(("10.77.0.1", 7777))
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
begin = time.perf_counter()
connection.send(b"x"), connection.recv(1)
print(time.perf_counter() - begin)
connection.sendall(bytes(999_999)), connection.recv(1)
"""


def test_what_is_sent_over_a_link_with_latency_arrives_later():
    """There and back; and packets that are longer than an Ethernet frame arrive as well."""
    if why := net.missing():
        pytest.skip(why)
    python = [sys.executable, "-c"]
    with net.links(2, net.Link(1000, ms=150)):
        serve = [*net.command(0), *python, SERVER]
        with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout.readline() == "ready\n"
                result = run_command([*net.command(1), *python, CLIENT])
                assert server.wait(60) == 0
            finally:
                server.kill()
    assert result.returncode == 0 and float(result.stdout) >= 0.3, result.stderr


@pytest.mark.slow
def test_ranks_of_two_machines_share_links():
    """On each machine two ranks read each other's memory. A unit is gathered twice and reduced
    once; of replicas one machine has all parameters, and only reductions leave it."""
    if why := net.missing():
        pytest.skip(why)
    link = net.Link(1000, ranks=2)
    found = measured("tiny", ["mini", "mini hybrid"], ranks=4, rounds=1, link=link, counts=False)
    whole = WORKLOADS["tiny"].nbytes
    sent = {name: median(found, name, 4) / whole for name in found}
    assert 2.7 < sent["mini"] < 3.2 and 0.9 < sent["mini hybrid"] < 1.2, sent
    # Of what a rank sends altogether three quarters go to the one beside it.
    assert 1.8 < median(found, "mini hybrid", 2) / whole < 2.2


def test_a_table_of_slow_links(monkeypatch, capsys):
    """Each row has contenders of its own, and says what they would take at best."""
    monkeypatch.setattr(net, "missing", lambda: "")
    asked = []

    def measured(workload, names, ranks, rounds, link, counts):
        asked.append((workload, ranks, link, counts))
        readings = {name: [(1.0, 1.0, 0, 0, 2**20)] * rounds for name in names}
        readings[names[-1]] = [(3.0, 1.0, 0, 0, 2**21)] * rounds
        return {name: {"readings": each, "computing": [1.1]} for name, each in readings.items()}

    monkeypatch.setattr(slow_links, "measured", measured)
    assert engine.main(["--net", "table", "--rounds", "2"]) == 0
    rows = capsys.readouterr().out.splitlines()[-len(slow_links.ROWS) :]
    assert asked == [(row.workload, row.ranks, row.link, False) for row in slow_links.ROWS]
    for row, words in zip(slow_links.ROWS, rows, strict=True):
        assert words.startswith(row.about)
        assert words.split()[-5:] == ["3.00", "3.00", "2.0", "1.0", "1.0"]
        assert words.split().count("3.00") == 3
    assert rows[2].split()[2:7] == ["comp", "3.00", "1.01", "to", "1.09"]


def sharded_as_the_page_says(block, layers):
    """A model that a block of tutorials/reference/using.md has sharded, after two steps."""
    page = Path(__file__).parents[1] / "tutorials/reference/using.md"
    _, *blocks = page.read_text().split("tests/test_bench_engine.py runs this block -->\n```py\n")
    torch.manual_seed(0)
    names = {"model": GPT(layers, width=64, vocab=16), "Block": Block}
    exec(blocks[block].partition("```")[0], names)
    for _ in range(2):
        names["model"](torch.arange(16)[None]).sum().backward()
    return names["model"]


@on_ranks(2)
def test_the_settings_for_slow_links_train():
    units = sharded_as_the_page_says(block=0, layers=3).engine.units[1:]
    assert [unit.reshard_after_forward for unit in units] == [False] * 2 + [True] * 2 + [False] * 2


@on_ranks(2)
def test_the_settings_for_far_links_gather_three_blocks_ahead():
    """When a block computes. Before the first one the root asks for them. The last one stays."""
    model = sharded_as_the_page_says(block=1, layers=6)
    units = [block._unit for block in model.blocks]
    gathered = {"forward": [], "backward": []}

    def look(when):
        there = [n for n, unit in enumerate(units) if unit.unsharded.storage.nbytes()]
        gathered[when].append(there)

    for block in model.blocks:
        block.mlp.register_forward_pre_hook(lambda *_: look("forward"))
        block.mlp.register_full_backward_pre_hook(lambda *_: look("backward"))
    model.norm.register_forward_pre_hook(lambda *_: look("forward"))
    model(torch.arange(16)[None]).sum().backward()
    assert gathered["forward"] == [
        [0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5], [4, 5], [5], [5],
    ]  # fmt: skip
    assert gathered["backward"] == [
        [2, 3, 4, 5], [1, 2, 3, 4], [0, 1, 2, 3], [0, 1, 2], [0, 1], [0],
    ]  # fmt: skip


@pytest.mark.parametrize("words", ["--model deep --only mini", "--model ranks --rounds 3 --bf16"])
def test_what_a_model_does_not_take_is_refused(words, capsys):
    """`--only` was ignored by `--model deep`."""
    with pytest.raises(SystemExit):
        engine.main(words.split())
    first = words.split()[2]
    assert f"{first}: --model {words.split()[1]} goes with --" in capsys.readouterr().err


@pytest.mark.slow
def test_the_host_is_timed_beyond_a_plain_module(tmp_path):
    command = [sys.executable, "-m", "tests.bench.engine", "--model", "deep", "--rounds", "1"]
    result = run_command([*command, "--json", tmp_path / "times"], seconds=200)
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "times").read_text()).keys() >= {"local", "FSDP1", "mini"}
    assert over_local({"local": [1.0, 5.0, 2.0], "mini": [4.0, 6.0, 4.0]}, "mini") == 2.0

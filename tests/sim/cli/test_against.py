"""sim/cli/against.py: a run's memory beside that of a snapshot."""

import json
import pickle

import pytest

from minifsdp.sim.__main__ import main
from minifsdp.sim.cli.against import table
from minifsdp.sim.memory.snapshots import Peak
from tests.sim.test_main import SMALL

MiB = 2**20


def rows(text):
    """Of the table: what, there, here."""
    lines = text[text.index("reserved then") :].splitlines()
    return {line[:32].strip(): tuple(line[32:].split()) for line in lines}


@pytest.mark.parametrize("settings", ["", "--batch 4096 --limit none", "--strategy no_shard"])
def test_a_run_is_equal_to_itself(settings, tmp_path, capsys):
    words = [*SMALL, *settings.split()]
    file = str(tmp_path / "snapshot")
    assert main([*words, "--snapshot", file]) == 0
    capsys.readouterr()
    assert main([*words, "--against", file]) == 0
    found = rows(capsys.readouterr().out)
    assert (len(found) > 5 and "gathered parameters" in found) or "no_shard" in settings
    assert all(there == here and ratio == "1.00" for there, here, ratio in found.values())


def test_another_run_is_not(tmp_path, capsys):
    file = str(tmp_path / "snapshot")
    main([*SMALL, "--snapshot", file])
    capsys.readouterr()
    assert main([*SMALL, "--optimizer", "sgd", "--json", "--against", file]) == 0
    (figures,) = json.loads(capsys.readouterr().out)
    there, here = figures["against"]["file"], figures["against"]["run"]
    assert there["allocated"] > here["allocated"] == figures["peak allocated"]
    assert there["asked"]["optimizer"] > 0 and "optimizer" not in here["asked"]


def test_the_table_has_what_only_one_of_them_has():
    there = Peak(8 * MiB, 6 * MiB, {"forward": 4 * MiB, "reductions": 2 * MiB})
    here = Peak(9 * MiB, 3 * MiB, {"forward": 2 * MiB, "optimizer": MiB})
    assert rows(table(there, here)) == {
        "reserved then": ("8.0", "9.0", "1.12"),
        "allocated then": ("6.0", "3.0", "0.50"),
        "forward": ("4.0", "2.0", "0.50"),
        "optimizer": ("0.0", "1.0"),
        "reductions": ("2.0", "0.0", "0.00"),
    }


@pytest.mark.parametrize(
    "words, message",
    [
        ("--against {tmp}/no", "--against: cannot read '{tmp}/no': No such file or directory"),
        ("--against {tmp}", "--against: cannot read '{tmp}': Is a directory"),
        ("--against {tmp}/text", "--against: '{tmp}/text' is no snapshot: "),
        ("--against {tmp}/other", "'{tmp}/other' is no snapshot, as torch.cuda.memory._dump_snap"),
        ("--against {tmp}/text --sweep limit=1,2", "--against compares one run; leave --sweep out"),
    ],
)
def test_what_is_no_snapshot_is_one_line_before_any_run(
    words, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("minifsdp.sim.cli.run._train", None)
    (tmp_path / "text").write_text("text")
    (tmp_path / "other").write_bytes(pickle.dumps({"weights": [1.0]}))
    assert main(words.replace("{tmp}", str(tmp_path)).split()) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1
    assert message.replace("{tmp}", str(tmp_path)) in err

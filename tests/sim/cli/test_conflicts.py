"""sim/cli/conflicts.py: options that are wrong together. test_main.py has them as typed."""

import argparse

import pytest

from minifsdp.sim.__main__ import parser
from minifsdp.sim.cli.conflicts import MOST_GPUS, check


def options(words: str) -> argparse.Namespace:
    return parser().parse_args(words.split())


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--memory 39",
        "--memory 39.39",  # all of an a100-40's
        "--memory 79 --gpu a100-80",
        f"--nodes {MOST_GPUS // 1024} --gpus 1024",
        "--model any:thing --input 3x4",
        "--engine fsdp1 --limit none --forward pre --backward post",
        "--engine fsdp2 --limit none",
    ],
)
def test_what_goes_together(words):
    check(options(words))


@pytest.mark.parametrize(
    "words, message",
    [
        ("--memory 40", r"--memory 40: a100-40 has 39\.39 GiB"),
        (f"--nodes {MOST_GPUS // 1024 + 1} --gpus 1024", "are more than 131,072 GPUs"),
        ("--model gpt", "'gpt' is not known; did you mean gpt-125m?"),
        ("--model vit-h --input 588", "--input is for a model of your own"),
        ("--model any:thing --input 588 --seq 64", "--seq is for texts; with --input"),
        ("--model hf:A --input 588 --config {file}", "--input is for a model of your own"),
        ("--model any:thing --config {file}", "--config is for a model of transformers"),
        ("--engine fsdp1 --forward post", "--engine fsdp1 has no --forward post; give none or pre"),
        ("--engine fsdp2 --backward none", "--engine fsdp2 has no --backward none; give pre, or"),
        ("--engine fsdp2 --limit 1", "--engine fsdp2 has no --limit 1; give true or none, or --e"),
    ],
)
def test_what_does_not(words, message, tmp_path):
    file = tmp_path / "config.json"
    file.write_text("{}")
    with pytest.raises(ValueError, match=message):
        check(options(words.replace("{file}", str(file))))


@pytest.mark.parametrize(
    "text, message",
    [(None, "cannot read"), (b"{", "is no JSON"), (b"\xff", "is no JSON"), (b"[]", "has a list")],
)
def test_a_configuration_is_an_object_in_a_json_file(text, message, tmp_path):
    file = tmp_path / "config.json"
    if text is not None:
        file.write_bytes(text)
    with pytest.raises(ValueError, match=message):
        check(options(f"--model hf:A --config {file}"))
    file.write_text("{}")
    check(options(f"--model hf:A --config {file}"))


def test_what_plan_will_choose_is_not_looked_at():
    given = options("--engine fsdp2")
    given.limit = given.forward = given.backward = None
    check(given)

"""sim/figures/throughput.py: tokens, flops, dollars."""

import pytest

from minifsdp.sim.cli.run import measure
from minifsdp.sim.figures.throughput import model_flops, throughput
from minifsdp.sim.tape import Note, Op, Phase
from tests.sim.cli.test_run import SMALL, options


def op(flops: float) -> Op:
    return Op("mm", "", "compute", 0, 0, 0, [], [], flops)


def test_model_flops_are_three_times_the_forwards():
    step = [Phase("forward", 0, 0), op(1), op(2), Phase("backward", 0, 0), op(50), Note(1)]
    assert model_flops([op(7), Phase("forward", 0, 0), op(9), Note(0), *step]) == 9
    assert model_flops([op(7), Note(1)]) == 0


def test_every_figure():
    step = {"step": 2.0, "flops": 12e12}
    assert throughput(step, 9e12, 10e12, samples=4, length=100, price=3.6) == pytest.approx(
        {
            "samples/s per GPU": 2,
            "tokens/s per GPU": 200,
            "TFLOPS per GPU": 4.5,
            "MFU": 0.45,
            "HFU": 0.6,
            "dollars per billion tokens": 5000,  # 5 M seconds at 0.1 cents
        }
    )


def test_samples_that_are_no_texts_have_no_tokens():
    step = {"step": 2.0, "flops": 12e12}
    figures = throughput(step, 9e12, 10e12, samples=4, length=None, price=3.6)
    assert figures["samples/s per GPU"] == 2 and not [name for name in figures if "token" in name]
    assert figures["dollars per million samples"] == pytest.approx(500)


def test_a_linear_models_flops_are_six_for_each_parameter_and_sample():
    figures, gpu = measure(options(f"{SMALL} --price 2"))
    assert gpu is not None
    assert model_flops(gpu.tape) == 6 * 64 * 4 * 8 * 1024**2
    peak = gpu.cluster.gpu.flops
    assert figures["MFU"] == pytest.approx(model_flops(gpu.tape) / figures["step"] / peak)
    assert figures["samples/s per GPU"] == pytest.approx(64 / figures["step"])
    assert "dollars per billion tokens" in figures


def test_what_is_computed_again_counts_in_one_of_them_only():
    figures, _ = measure(options(f"{SMALL} --recompute full"))
    # Of a block's two products only the first: its backward does not need what the second made.
    assert figures["HFU"] == pytest.approx(7 / 6 * figures["MFU"])


def test_the_data_sheet_is_read_in_the_precision_of_the_run():
    figures, gpu = measure(options(f"{SMALL} --precision fp32"))
    achieved = figures["TFLOPS per GPU"] * 1e12
    assert gpu is not None and figures["MFU"] * gpu.cluster.gpu.flops_fp32 == pytest.approx(
        achieved
    )

"""Make calculator.html: whether a model of one's own fits, worked out in the browser.

    python tutorials/calculator.py      # `make tutorials` does it, too

What it computes is formulas.py, translated (javascript.py). tests/test_calculator.py holds that
against the virtual GPU.
"""

import json
import sys
from math import ceil
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from minifsdp.sim.hardware.costs import Cluster
from minifsdp.sim.hardware.gpus import GPUS
from minifsdp.sim.training.sizes import SIZES
from minifsdp.sim.views.html import fill_in
from tutorials.javascript import javascript
from tutorials.virtual_run import sizes

ROOM, SPARE = 1.25, 2**28
"""How much memory there has to be, to what tensors take at most, and how many bytes beyond that, so
that a step surely fits: the allocator cannot use all of it, and its segments are of 2 to 20 MiB and
more. With less memory it may fit, by luck or with retries. tests/test_calculator.py runs both."""
PRESETS = (
    *("gpt-125m", "gpt-1.3b", "gpt-7b", "gpt-13b", "gpt-30b", "gpt-175b"),
    *("llama2-7b", "llama2-13b", "llama3-8b", "llama3-70b"),
)
VOCABULARY = 50304  # of the GPTs in sim/training/models.py


def preset(name: str) -> dict[str, Any]:
    """What the page asks of a model."""
    kind, (width, layers, *others) = SIZES[name]
    params, unit, root = sizes(name)
    values = 16  # see formulas.activations
    if kind == "llama":
        heads, of_keys, hidden, _ = others
        # Two norms keep 8, in part in fp32; queries and what attention returns 1 each, keys and
        # values as many as their heads are; and the MLP four results.
        values = ceil(10 + 2 * of_keys / heads + 4 * hidden / width)
    return {
        "params": params, "root": root, "unit": unit, "layers": layers, "width": width,
        "vocabulary": others[-1] if kind == "llama" else VOCABULARY, "values": values,
    }  # fmt: skip


def page() -> str:
    """The page as it should be now."""
    data = {
        "models": {name: preset(name) for name in PRESETS},
        "gpus": {name: Cluster(gpu).capacity for name, gpu in GPUS.items()},
        "room": ROOM,
        "spare": SPARE,
    }
    formulas = javascript((HERE / "formulas.py").read_text(), "sheet")
    places = {"data": json.dumps(data, separators=(",", ":")), "formulas.js": formulas}
    return fill_in(HERE / "calculator_page.html", places)


if __name__ == "__main__":
    (HERE / "calculator.html").write_text(page())

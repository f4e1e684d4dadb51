"""tutorials/checkpoints.py: killed at any time, a training goes on as if it had not been; and what
cannot be loaded is refused, on all ranks, before anything is changed."""

import io
import os
import pickle
import random
import signal
import sys
import time
from pathlib import Path, PosixPath

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from minifsdp import FullyShardedDataParallel as FSDP
from tests.patience import run_command
from tests.ranks import device, on_ranks, run
from tests.small import layers, stack

pytest.importorskip("numpy", reason="torch.distributed.checkpoint of several ranks needs it")

from tutorials.checkpoints import Checkpoints, _Unpickler

IN_ROWS = pytest.mark.parametrize("in_rows", [False, True])


class Training:
    """A small one, with all that a checkpoint has to have: it draws data and noise."""

    def __init__(self, folder, steps, width=6, **settings):
        self.model = stack(1, width, **settings)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, 0.01, total_steps=steps + 1, cycle_momentum=False
        )
        self.sampler = torch.Generator().manual_seed(dist.get_rank())
        torch.manual_seed(5 + dist.get_rank())
        self.losses, self.width, self.steps = torch.zeros(steps), width, steps
        saved = self.model, self.optimizer, self.schedule, {"steps": steps}
        self.checkpoints = Checkpoints(Path(folder), *saved)

    def own(self):
        states = {"sampler": self.sampler.get_state(), "random": torch.get_rng_state()}
        return {"losses": self.losses, **states}

    def resume(self):
        own = self.own()
        done = self.checkpoints.resume(own)
        self.sampler.set_state(own["sampler"])
        torch.set_rng_state(own["random"])
        return done

    def step(self, at):
        data = torch.randn(2, self.width, generator=self.sampler) + torch.randn(2, self.width)
        loss = self.model(data.to(device())).pow(2).sum()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.losses[at - 1] = loss.detach()

    def go_on(self, every=5, until=None):
        for at in range(self.resume() + 1, (until or self.steps) + 1):
            self.step(at)
            if at % every == 0:
                self.checkpoints.save(at, self.own())
        self.checkpoints.close()
        return self.losses

    def values(self):
        """All that is saved, as one list, on the host."""
        optimizer = FSDP.optim_state_dict(self.model, self.optimizer)
        state = [dict(self.model.state_dict()), optimizer, self.schedule.state_dict()]
        return [v.cpu().clone() if isinstance(v, torch.Tensor) else v for v in tree_leaves(state)]


def same(a, b):
    equal = (torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
             for x, y in zip(a, b, strict=True))  # fmt: skip
    return all(equal)


@IN_ROWS
@on_ranks(2)
def test_a_training_that_was_stopped_goes_on_in_every_bit(in_rows, tmp_path):
    whole = Training(tmp_path / "whole", 20, use_orig_params=in_rows)
    expected = whole.go_on()
    Training(tmp_path / "parts", 20, use_orig_params=in_rows).go_on(until=13)
    again = Training(tmp_path / "parts", 20, use_orig_params=in_rows)
    assert again.resume() == 10
    assert torch.equal(again.go_on(), expected) and same(again.values(), whole.values())
    dist.barrier()
    folders = sorted(path.name for path in (tmp_path / "parts").iterdir())
    assert folders == ["step-000015", "step-000020"]  # the newest two


@IN_ROWS
@on_ranks(2)
def test_what_is_saved_is_of_the_moment_of_the_call(in_rows, tmp_path):
    """The next steps run while it is being written."""
    training = Training(tmp_path, 20, use_orig_params=in_rows)
    training.step(1)
    expected = training.values()
    training.checkpoints.save(1, training.own())
    for at in range(2, 12):
        training.step(at)
    training.checkpoints.close()
    again = Training(tmp_path, 20, use_orig_params=in_rows)
    assert again.resume() == 1 and same(again.values(), expected)


def trained(folder, until):
    training = Training(folder, 20)
    training.go_on(until=until)
    return training.values()


def goes_on(folder, values, ranks):
    training = Training(folder, 20, use_orig_params=True)
    assert training.resume() == 10 and training.checkpoints.ranks == ranks
    assert same(training.values(), values)
    assert training.losses[:10].any() == (dist.get_rank() < ranks)
    assert len(set(training.go_on()[10:].tolist())) == 10


@pytest.mark.parametrize("ranks", [(2, 3), (3, 1)])
def test_another_number_of_ranks_goes_on(ranks, tmp_path):
    values = run(trained, ranks[0], tmp_path, 10)[0]
    run(goes_on, ranks[1], tmp_path, values, ranks[0])


# ------------------------------------------------------------------------------ what cannot be read


def cut(file):
    os.truncate(file, file.stat().st_size // 2)


def flip(file):
    data = bytearray(file.read_bytes())
    for at in range(100, len(data), 97):
        data[at] ^= 0xFF
    file.write_bytes(data)


class Evil:
    """Its pickle runs a program when it is loaded."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def run_code(file):
    file.write_bytes(pickle.dumps(Evil(file.parent.parent / "evil")))


def run_code_by_a_path(file):
    """`pathlib` has to be known, and has a module in it that runs programs."""
    mark = str(file.parent.parent / "evil").encode()
    file.write_bytes(b"\x80\x04\x8c\x07pathlib\x8c\x09os.system\x93\x8c" + bytes([len(mark) + 6])
                     + b"touch " + mark + b"\x85R.")  # fmt: skip


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_paths_are_read_under_the_names_of_all_pythons(module):
    """A checkpoint has one. Python 3.13 writes another name than those before and after it."""
    written = f"c{module}\nPosixPath\n(Vfolder\ntR.".encode()
    assert _Unpickler(io.BytesIO(written)).load() == PosixPath("folder")


DAMAGE = {
    "its list is cut": (".metadata", cut, "EOFError|Unpickling|truncated"),
    "its list is empty": (".metadata", lambda file: file.write_bytes(b""), "EOFError"),
    "its list is of another kind": (".metadata", lambda f: f.write_bytes(pickle.dumps(3)), "int"),
    "a file is cut": ("__1_0.distcp", cut, "step-000010"),
    "a file is gone": ("__1_0.distcp", Path.unlink, "No such file"),
    "a file has other bytes": ("__0_0.distcp", flip, "step-000010"),
    "its list runs a program": (".metadata", run_code, r"asks for posix\.system"),
    "its list runs another": (".metadata", run_code_by_a_path, r"asks for pathlib\.os\.system"),
    "an entry runs a program": ("__0_0.distcp", run_code, "step-000010"),
}


@pytest.mark.few(5)
@pytest.mark.parametrize("damage", DAMAGE)
@on_ranks(2)
def test_a_damaged_one_is_refused_and_nothing_is_loaded(damage, tmp_path):
    name, change, says = DAMAGE[damage]
    Training(tmp_path, 20).go_on(until=10)
    dist.barrier()
    if dist.get_rank() == 0:
        change(tmp_path / "step-000010" / name)
    dist.barrier()
    training = Training(tmp_path, 20)
    training.step(1)
    before = training.values()
    with pytest.raises(RuntimeError, match=rf"(?s)cannot go on from.*({says}).*Nothing was"):
        training.resume()
    assert same(training.values(), before) and not (tmp_path / "evil").exists()
    dist.barrier()
    if dist.get_rank() == 0:
        (tmp_path / "step-000010").rename(tmp_path / "step-000010-damaged")
    dist.barrier()
    assert training.resume() == 5


@on_ranks(2)
def test_one_that_is_not_complete_is_passed_over(tmp_path):
    Training(tmp_path, 20).go_on(until=10)
    dist.barrier()
    if dist.get_rank() == 0:
        (tmp_path / "step-000010" / ".metadata").unlink()
    dist.barrier()
    assert Training(tmp_path, 20).resume() == 5


@pytest.mark.parametrize("other, says", [
    ({"width": 7}, r"the model has 0\.weight of \[7, 7\], the checkpoint one of \[6, 6\]"),
    ({"steps": 30}, "it was made with steps 20, not 30"),
])  # fmt: skip
@on_ranks(2)
def test_one_of_another_model_or_run_is_refused(other, says, tmp_path):
    Training(tmp_path, 20).go_on(until=5)
    dist.barrier()
    training = Training(tmp_path, **{"steps": 20, **other})
    before = training.values()
    with pytest.raises(RuntimeError, match=says):
        training.resume()
    assert same(training.values(), before)


@pytest.mark.parametrize("blocks, says", [
    (2, r"the model has 2\.0\..* the checkpoint no such parameter"),
    (0, r"the checkpoint has 1\.0\.bias, and the model has no such parameter"),
])  # fmt: skip
@on_ranks(2)
def test_one_with_fewer_or_more_parameters_is_refused(blocks, says, tmp_path):
    Training(tmp_path, 20).go_on(until=5)
    dist.barrier()
    training = Training(tmp_path, 20)
    training.checkpoints.model = model = FSDP(layers(blocks))
    training.checkpoints.optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(RuntimeError, match=says):
        training.resume()


# --------------------------------------------------------------------------------------- killed


def be_a_rank(folder, rank, store, steps):
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    training = Training(folder / "checkpoints", steps)
    losses = training.go_on(every=3)
    torch.save((losses, training.values()), folder / f"end{rank}.tmp")
    (folder / f"end{rank}.tmp").rename(folder / f"end{rank}")
    dist.barrier()


def start(folder, attempt, steps):
    """Two ranks, forked from this process, which has imported all that they need."""
    ranks = []
    for rank in range(2):
        process = os.fork()
        if not process:
            code = 1
            try:
                os.dup2(os.open(folder / "errors", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
                be_a_rank(folder, rank, str(folder / f"store{attempt}"), steps)
                code = 0
            finally:
                os._exit(code)
        ranks.append(process)
    return ranks


def ended(ranks, seconds):
    """Wait for processes. Returns whether all have ended in time."""
    left, deadline = set(ranks), time.monotonic() + seconds
    while left and time.monotonic() < deadline:
        left -= {process for process in left if os.waitpid(process, os.WNOHANG)[0]}
        time.sleep(0.005)
    return not left


def kill_and_start_again(folder, kills, steps):
    """Until the training has come to its end, which it may after the last kill. Prints how often a
    rank was killed in the middle, and how often both."""
    torch.set_num_threads(1)
    random.seed(kills)
    counts = {1: 0, 2: 0}
    for attempt in range(10 * kills + 1):
        ranks = start(folder, attempt, steps)
        if sum(counts.values()) < kills:
            if ended(ranks, random.uniform(0.2, 1.2)):
                break
            killed = ranks if random.random() < 0.8 else ranks[:1]
            for process in killed:
                os.kill(process, signal.SIGKILL)
            counts[len(killed)] += 1
            time.sleep(random.uniform(0, 0.1))
            if len(killed) == 1:  # what torchrun does then
                os.kill(ranks[1], signal.SIGKILL)
            for process in ranks:
                os.waitpid(process, 0)
        elif ended(ranks, 300):
            break
    print(counts[1], counts[2])


KILLS = int(os.environ.get("KILLS", "12"))


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks its ranks")
def test_killed_again_and_again_it_comes_to_the_same_end(tmp_path):
    """KILLS=50 for more. Each time it goes on from the newest complete checkpoint."""
    if torch.cuda.is_available():
        pytest.skip("processes that are forked cannot use CUDA")
    steps = 40 * KILLS
    for folder, kills in (("whole", 0), ("killed", KILLS)):
        (tmp_path / folder).mkdir()
        command = [sys.executable, "-W", "ignore", "-c",
                   "import sys; from pathlib import Path; from tests import test_checkpoints as t;"
                   "t.kill_and_start_again(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))",
                   tmp_path / folder, str(kills), str(steps)]  # fmt: skip
        root = Path(__file__).parent.parent
        done = run_command(command, seconds=900, cwd=root)
        assert done.returncode == 0, done.stderr
    one, both = map(int, done.stdout.split())
    assert one + both == KILLS, "it came to its end before: take more steps"
    for rank in range(2):
        losses, values = torch.load(tmp_path / "whole" / f"end{rank}")
        found, its_values = torch.load(tmp_path / "killed" / f"end{rank}")
        assert torch.equal(found, losses) and same(its_values, values)

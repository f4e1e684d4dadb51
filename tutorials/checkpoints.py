"""Checkpoints of a training that goes on by itself after it was killed.

    checkpoints = Checkpoints(folder, model, optimizer, schedule, settings)
    done = checkpoints.resume(own)              # 0 if there is none; else the newest complete one
    for step in range(done + 1, steps + 1):
        ...
        if step % 50 == 0:
            checkpoints.save(step, own)         # the step after it runs while this is being written
    checkpoints.close()

Each rank writes its own part, in the form of torch.distributed.checkpoint, which any number of
ranks can read, with any strategy and in any layout. A checkpoint is complete when its `.metadata`
is there, which is written last. So a process may be killed at any time.

Loading runs no code from the files. torch's own reader would: the list of what is in a checkpoint
is a pickle, and so are the entries that are no tensors.
"""

import contextlib
import io
import pickle
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from minifsdp import state_to_load, state_to_save


class Checkpoints:
    """The newest checkpoints of one training, in a folder that all ranks see.

    Args:
        schedule: of the learning rate. Its state is the same on all ranks.
        settings: of the run, as numbers and text. They have to be the same when it goes on.
        keep: how many complete checkpoints to keep.

    Attributes:
        ranks: how many there were when the checkpoint was made that :meth:`resume` has loaded.
    """

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: Any,
        settings: dict[str, Any],
        keep: int = 2,
    ) -> None:
        self.folder, self.keep, self.settings = folder, keep, settings
        self.model, self.optimizer, self.schedule = model, optimizer, schedule
        self.group = dist.new_group(backend="gloo")  # what is written needs no turn in a step
        self.writing: Any = None
        self.ranks = dist.get_world_size()

    def save(self, step: int, own: dict[str, Tensor]) -> None:
        """Copy the state, and begin to write it. Every rank calls it.

        Args:
            own: what only this rank has: random states, the place in its data, its losses.
        """
        self._finish()
        folder = self._of(step)
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)  # the process was killed while it wrote this
        dist.barrier(self.group)
        state = state_to_save(self.model, self.optimizer)
        state |= {"schedule": self.schedule.state_dict(), "settings": self.settings}
        state["ranks"] = {str(dist.get_rank()): own}
        self.writing = dcp.async_save(state, checkpoint_id=folder, process_group=self.group)

    def resume(self, own: dict[str, Tensor]) -> int:
        """Load the newest complete checkpoint, if there is one. Every rank calls it.

        Args:
            own: tensors as :meth:`save` gets them, written. A rank that was not there when the
                checkpoint was made keeps what it has.

        Returns:
            The number of steps that are done.

        Raises:
            RuntimeError: the checkpoint cannot be read, or is of another model or another run. All
                ranks raise it, and nothing was loaded.
        """
        complete = [] if dist.get_rank() else self._complete()
        newest = torch.tensor(complete[-1] if complete else 0)
        dist.broadcast(newest, 0, self.group)
        if not newest:
            return 0
        folder, me = self._of(int(newest)), str(dist.get_rank())
        found: dict[str, Any] = {"settings": dict(self.settings)}
        with state_to_load(self.model, self.optimizer) as state:  # an error leaves all as it was
            state["schedule"] = self.schedule.state_dict()
            with self._one_error(folder):
                saved = Reader(folder).read_metadata().state_dict_metadata
                _check_model(state["model"], saved)
                ranks = {name.split(".")[1] for name in saved if name.startswith("ranks.")}
                if me in ranks:
                    copies = {name: value.clone() for name, value in own.items()}
                    state["ranks"] = {me: copies}
            with self._one_error(folder):
                self._load(found, folder)
                for name, value in found["settings"].items():
                    if value != self.settings[name]:
                        its = self.settings[name]
                        raise ValueError(f"it was made with {name} {value}, not {its}")
            with self._one_error(folder):
                self._load(state, folder)
        self.ranks = len(ranks)
        self.schedule.load_state_dict(state["schedule"])
        for name, value in state.get("ranks", {}).get(me, {}).items():
            own[name].copy_(value)
        return int(newest)

    def _load(self, state: dict[str, Any], folder: Path) -> None:
        reader, planner = Reader(folder), Planner()
        dcp.load(state, storage_reader=reader, planner=planner, process_group=self.group)

    def close(self) -> None:
        """Wait until everything is written."""
        self._finish()

    def _finish(self) -> None:
        if self.writing is not None:
            try:
                self.writing.result()
            except CheckpointException as error:  # which all ranks get
                first = str(next(iter(error.failures.values()))[0]).splitlines()[0]
                why = f"a checkpoint could not be written to {self.folder}: {first}; is it full?"
                raise SystemExit(1 if dist.get_rank() else why) from None
            self.writing = None
            for step in self._complete()[: -self.keep] if dist.get_rank() == 0 else []:
                (self._of(step) / ".metadata").unlink()  # first: it is not complete any more
                shutil.rmtree(self._of(step), ignore_errors=True)

    def _of(self, step: int) -> Path:
        return self.folder / f"step-{step:06}"

    def _complete(self) -> list[int]:
        steps = [file.parent.name[5:] for file in self.folder.glob("step-*/.metadata")]
        return sorted(int(step) for step in steps if step.isdigit())  # others are somebody's own

    @contextlib.contextmanager
    def _one_error(self, folder: Path) -> Any:
        """If a rank fails inside, let all of them raise an error that says why."""
        why = None
        try:
            yield
        except (Exception, CheckpointException) as error:
            failures = getattr(error, "failures", None)  # of each rank, from torch
            cause = next(iter(failures.values()))[0] if failures else error
            why = f"{type(cause).__name__}: {cause}"
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, why, self.group)
        if reasons := [reason for reason in everyones if reason]:
            raise RuntimeError(
                f"cannot go on from {folder}: {reasons[0]}\nNothing was loaded. To go on from the "
                f"checkpoint before it, or from the beginning, move that folder away."
            )


def _check_model(state: dict[str, Any], saved: dict[str, Any]) -> None:
    there = {name[6:]: entry for name, entry in saved.items() if name.startswith("model.")}
    for name, value in state.items():
        shape = getattr(there.get(name), "size", None)
        if shape != value.shape:
            has = "no such parameter" if shape is None else f"one of {list(shape)}"
            raise ValueError(f"the model has {name} of {list(value.shape)}, the checkpoint {has}")
    if unknown := there.keys() - state.keys():
        raise ValueError(f"the checkpoint has {min(unknown)}, and the model has no such parameter")


class Reader(dcp.FileSystemReader):
    """Reads what is in a checkpoint, from a pickle that may contain nothing else."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _Unpickler(file).load()
        metadata.storage_meta = metadata.storage_meta or dcp.metadata.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


_KNOWN = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "WindowsPath"},
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "pathlib._local":  # where Python 3.13 says that its paths are
            module = "pathlib"
        if name in _KNOWN.get(module, ()):
            return super().find_class(module, name)
        found = vars(torch).get(name) if module == "torch" else None
        if found is torch.Size or isinstance(found, (torch.dtype, torch.memory_format)):
            return found
        raise pickle.UnpicklingError(f"its list of contents asks for {module}.{name}")


class Planner(dcp.DefaultLoadPlanner):
    """Reads entries that are no tensors as data."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        data = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), data)
        data.seek(0)
        super().load_bytes(read_item, data)

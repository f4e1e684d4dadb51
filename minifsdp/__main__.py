"""The command ``minifsdp``, and ``python -m minifsdp``: one front door to all that can be run.

``sim``, ``plan``, ``calibrate`` and ``cluster`` are part of the package. The others are programs in
tutorials/, which only a clone of the repository has. They replace this process, and import all from
the clone, whatever else is installed.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from minifsdp import __version__
from minifsdp.sim.cli.options import COMMANDS
from minifsdp.sim.cli.terminal import begin
from minifsdp.sim.cli.values import meant

PACKAGED = ("sim", *COMMANDS)
IN_A_CLONE = {
    "demo": "tutorials.train_gpt",
    "student": "tutorials.exercises.student",
    "grade": "tutorials.exercises.grade",
    "hint": "tutorials.exercises.hint",
}
AS_MODULE = (
    "import runpy, sys; del sys.path[0]; name = sys.argv.pop(1); sys.argv[0] = '-m'; "
    "runpy.run_module(name, run_name='__main__', alter_sys=True)"
)
"""As ``python -m``, but without the current folder, which may have a package ``tests``."""
HELP = """\
on a virtual GPU, without any GPU:
  sim        run a training step: does it fit, how fast is it, and what binds it
  plan       search for the fastest settings that fit
  calibrate  measure this machine; a file of its constants, for sim and plan
  cluster    print such a file for a GPU that is known, to be edited

in a clone of the repository:
  demo       train a small GPT, sharded, and compare it with DDP
  student    make a folder for the course: an FSDP to write from nothing
  grade      say what is right in that folder, what is not, and why
  hint       give a hint for an exercise

minifsdp COMMAND --help says what a command takes.
"""
CLONE = "git clone https://github.com/minifsdp/minifsdp && cd minifsdp"


def main() -> int:
    """Run what the user has typed; returns the exit status."""
    begin()
    module = Path(sys.argv[0]).name == "__main__.py"
    prog = "python -m minifsdp" if module else "minifsdp"
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [--help] [--version] COMMAND ...",
        description="PyTorch's fully sharded data parallel training, written again to be read.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"minifsdp {__version__}")
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    name = options.command
    if name is None:
        parser.print_help()
        return 2
    if name in PACKAGED:
        from minifsdp.sim.__main__ import command

        sys.path.insert(0, "")  # as `python -m` has it: --model may name a module of the user's
        return command(name, options.rest, f"{prog} {name}")
    if name in IN_A_CLONE:
        return _in_a_clone(name, options.rest, f"{prog} {name}")
    close = meant(name, [*PACKAGED, *IN_A_CLONE]) or "; --help lists them"
    print(f"minifsdp: there is no command {name!r}{close}", file=sys.stderr)
    return 2


def _in_a_clone(name: str, rest: Sequence[str], prog: str) -> int:
    """Become a program of the clone that this package is in, or else of the current folder."""
    clone = next(filter(_is_clone, (Path(__file__).parent.parent, Path.cwd())), None)
    if clone is None:
        print(
            f"minifsdp: {name} needs a clone of the repository, and runs there: {CLONE}",
            file=sys.stderr,
        )
        return 2
    path = os.pathsep.join(filter(None, [str(clone), os.environ.get("PYTHONPATH")]))
    about = {"PYTHONPATH": path, "MINIFSDP_TYPED": prog}
    words = [sys.executable, "-c", AS_MODULE, IN_A_CLONE[name], *rest]
    os.execve(sys.executable, words, {**os.environ, **about})


def _is_clone(folder: Path) -> bool:
    return (folder / "tutorials" / "train_gpt.py").is_file() and (folder / "minifsdp").is_dir()


if __name__ == "__main__":
    sys.exit(main())

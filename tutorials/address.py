"""Where the repository, its site and its notebooks are, from [project.urls] of pyproject.toml."""

from pathlib import Path

try:
    import tomllib
except ImportError:  # Python 3.10, where pytest brings this one along
    import tomli as tomllib

_URLS = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["urls"]
SITE: str = _URLS["Homepage"]
REPOSITORY: str = _URLS["Repository"]

BRANCH = "notebooks"  # to which .github/workflows/site.yml publishes what notebooks.py makes
NOTEBOOKS = [
    *("00_ddp", "01_collectives", "02_flatten", "03_shard", "04_unshard", "05_hooks"),
    *("06_one_file", "29_steps"),
]


def colab(page: str) -> str:
    """The address at which Colab opens the notebook of a page."""
    repository = REPOSITORY.removeprefix("https://github.com/")
    return f"https://colab.research.google.com/github/{repository}/blob/{BRANCH}/{page}.ipynb"

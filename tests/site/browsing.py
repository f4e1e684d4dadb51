"""The site, built and served, for a browser."""

import functools
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).parents[2]


def built(folder: Path) -> Path:
    """Build the site, as `make site` does. MkDocs is strict: it fails at a link to nothing."""
    command = [sys.executable, "-m", "mkdocs", "build"]
    command += ["--config-file", ROOT / "tutorials" / "site" / "mkdocs.yml", "--site-dir", folder]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address at which the files of a folder are, until the end of the block."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


class Html(HTMLParser):
    """What is of interest in a page: its links, the names of its places, its tags and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[tuple[str, str]] = []  # tag and address
        self.names: set[str] = set()
        self.tags: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        its = dict(attrs)
        self.tags.append(tag)
        self.names |= {its[name] or "" for name in ("id", "name") if name in its}
        self.links += [(tag, its[name] or "") for name in ("href", "src") if name in its]

    def handle_data(self, data: str) -> None:
        self.words += data.split()

"""Take screenshots of what a newcomer sees: `make screenshots` writes docs/images.

The first run is that of `make train`: its terminal, and its web page. The second run trains the
same recipe on two "nodes", which are two torchrun agents with different host names, and sends its
data to a real MLflow server, whose pages are shown.
"""

import contextlib
import html
import io
import math
import os
import pty
import re
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from browser import NO_BROWSER, Browser, find_program
from harness import Job, environment, pipeline, torchrun, two_nodes
from PIL import Image
from server import Server

HOSTS = ("node-0", "node-1")
WIDTH = 1400
ASSISTANT = "Close"
"""The button that closes the assistant panel, which MLflow opens on each page."""
COLUMNS, ROWS = 100, 40
"""Size of the terminal."""
TERMINAL = """<!DOCTYPE html><meta charset="utf-8"><style>
body { margin: 0; background: #fff; }
pre { display: inline-block; min-width: 100ch; margin: 0; vertical-align: top; padding: 18px;
  border-radius: 8px; background: #1b222b; color: #e6eaf0; font: 14px/1.35 monospace; }
b { color: #fff; }
</style><body><pre>%s</pre></body>"""


@dataclass(frozen=True)
class Page:
    name: str
    path: str
    """Path below the experiment, with a placeholder for the run."""
    shows: tuple[str, ...]
    """Texts that the complete page shows."""
    height: int
    clicks: tuple[str, ...] = ()
    """Texts of the elements to click on first."""


PAGES = (
    Page("overview", "runs/{run}", ("To repeat it", "v1"), 1200, clicks=("Show more",)),
    Page("curves", "runs/{run}/model-metrics", ("train/loss", "val/top1"), 1500, clicks=("time",)),
    Page("system", "runs/{run}/system-metrics", tuple(f"system/{host}/rss_mib" for host in HOSTS), 1100),
)


def train(folder: Path, server: Server) -> Job:
    data = f"data.root={folder / 'data' / 'digits'}"
    words = [
        "digits",
        data,
        f"track.uri={server.uri}",
        "track.register=digits@best",
        "train.epochs=6",
        "run.threads=1",
    ]
    job = Job(folder / "runs" / "digits", words, nproc=2)
    print(two_nodes(job, HOSTS).done, flush=True)
    sent = pipeline("sync", str(job.folder))  # the rest that the sender has not sent yet
    assert sent.code == 0, sent.err
    return job


def newcomer(browser: Browser, scratch: Path, out: Path) -> None:
    """Train as `make train` does, in a terminal, and show the terminal and the run's web page."""
    command = [*torchrun(2), "train", "digits"]
    lines = ["<b>$ make train</b>", *render(in_terminal(command, scratch))]
    page = scratch / "terminal.html"
    page.write_text(TERMINAL % "\n".join(lines))
    browser.open(page.as_uri(), WIDTH, 100)
    box = "(({width, height}) => [width, height])(document.body.firstChild.getBoundingClientRect())"
    size = browser.evaluate(box)
    width, height = map(math.ceil, size)
    save("terminal", browser.capture(page.as_uri(), width, height, (), ("done step=",)), out)
    report = scratch / "runs" / "digits" / "report" / "index.html"
    save("report-page", browser.capture(report.as_uri(), 1200, 1250, (), ("Confusion",)), out)


def in_terminal(command: list[str], cwd: Path) -> str:
    """Return the output of a command in a terminal, with a clone's folder in place of `cwd`."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (ROWS, COLUMNS))
    env = environment(OMP_NUM_THREADS="1", TERM="xterm-256color", COLUMNS=str(COLUMNS))
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=cwd, env=env)
    os.close(theirs)
    output = bytearray()
    with contextlib.suppress(OSError):  # the end of a terminal is an error
        while read := os.read(ours, 65536):
            output += read
    os.close(ours)
    if process.wait():
        raise RuntimeError(f"exit code {process.returncode}: {output.decode()}")
    return output.decode().replace(str(cwd), "/home/me/ddp-pipeline")


def render(output: str) -> Iterator[str]:
    """Yield the lines that a terminal shows after this output, as HTML.

    It knows a carriage return, "erase to the end of the line", and bold; other sequences are left
    out.
    """
    for line in output.removesuffix("\r\n").split("\r\n"):
        cells: list[tuple[str, bool]] = []
        column, is_bold = 0, False
        for control, code, character in re.findall(r"\x1b\[([\d;?]*)([A-Za-z])|([^\x1b])", line):
            if character == "\r":
                column = 0
            elif character:
                cells[column : column + 1] = [(character, is_bold)]
                column += 1
            elif code == "m":
                is_bold = control == "1"
            elif code == "K":
                del cells[column:]
        for start in range(0, max(1, len(cells)), COLUMNS):
            row = [(html.escape(shown), bold) for shown, bold in cells[start : start + COLUMNS]]
            yield "".join(f"<b>{shown}</b>" if bold else shown for shown, bold in row).rstrip()


def capture_all(browser: Browser, server: Server, job: Job, out: Path) -> None:
    run = server.run_of(job)
    for page in PAGES:
        path = page.path.format(run=run.info.run_id)
        # Without the query MLflow opens its view of traces.
        url = f"{server.uri}/#/experiments/{run.info.experiment_id}/{path}?workflowType=machine_learning"
        screenshot = browser.capture(url, WIDTH, page.height, (ASSISTANT, *page.clicks), page.shows)
        save(page.name, screenshot, out)


def save(name: str, screenshot: bytes, out: Path) -> None:
    """Write the screenshot with 256 colours, which is enough for these pages."""
    reduced = Image.open(io.BytesIO(screenshot)).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    reduced.save(out / f"{name}.png", optimize=True)


def main() -> int:
    out = Path(sys.argv[1])
    program = find_program()
    if program is None:
        print(NO_BROWSER, file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="screenshots-") as folder, contextlib.ExitStack() as running:
        scratch = Path(folder)
        browser = Browser(program, scratch / "profile")
        running.callback(browser.close)
        newcomer(browser, scratch, out)
        server = running.enter_context(Server(scratch))
        capture_all(browser, server, train(scratch / "two-nodes", server), out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

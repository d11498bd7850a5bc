"""Take screenshots of what a newcomer sees: `make screenshots` writes docs/images.

The first run is that of `make train`: its terminal, and its web page. The second run trains the
same recipe on two "nodes", which are two torchrun agents with different host names, and sends its
data to a real MLflow server, whose pages are shown. The others are ten runs of a search, compared.
"""

import argparse
import contextlib
import html
import io
import json
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
from harness import Job, environment, on_host, pipeline, torchrun, two_nodes
from PIL import Image
from server import Server

HOSTS = ("node-0", "node-1")
WIDTH = 1400
ASSISTANT = "Close"
"""The button that closes the assistant panel, which MLflow opens on each page."""
MAX_BYTES = 200_000
"""Largest size of a screenshot."""
COLUMNS, ROWS = 100, 40
"""Size of the terminal."""
TERMINAL = """<!DOCTYPE html><meta charset="utf-8"><style>
body { margin: 0; background: #fff; }
pre { display: inline-block; min-width: 100ch; margin: 0; vertical-align: top; padding: 18px; border-radius: 8px;
  background: #1b222b; color: #e6eaf0; font: 14px/1.35 monospace; }
b { color: #fff; }
</style><body><pre>%s</pre></body>"""


@dataclass(frozen=True)
class Page:
    name: str
    path: str
    """Path below the experiment, with placeholders for run and model."""
    shows: tuple[str, ...]
    """Texts that the complete page shows."""
    height: int
    clicks: tuple[str, ...] = ()
    """Texts of the elements to click on first."""


PAGES = (
    Page("overview", "runs/{run}", ("To repeat it", "v1"), 1200, clicks=("Show more",)),
    Page("curves", "runs/{run}/model-metrics", ("train/loss", "val/top1"), 1500, clicks=("time",)),
    Page("images", "runs/{run}/artifacts/report/confusion.png", ("confusion.png",), 950),
    Page("model", "models/{model}", ("val/top1",), 1000),
    Page("dataset", "runs/{run}", ("val images",), 700, clicks=("{data}",)),
    Page("system", "runs/{run}/system-metrics", tuple(f"system/{host}/rss_mib" for host in HOSTS), 1100),
)
SHOWN = ("newcomer", "mlflow", "search")
"""The groups: a terminal and the page of its run, one run in MLflow, ten runs compared there."""
SEARCH = tuple(f"optimizer.lr={rate} run.seed={seed}" for rate in (0.02, 0.05, 0.1, 0.2, 0.4) for seed in (0, 1))
"""The changes of the recipe in each run of the search."""


def train(folder: Path, server: Server) -> Job:
    data = f"data.root={folder / 'data' / 'digits'}"
    words = ["digits", data, f"track.uri={server.uri}", "track.register=digits@best", "train.epochs=6", "run.threads=1"]
    job = Job(folder / "runs" / "digits", words, nproc=2)
    print(two_nodes(job, HOSTS).done, flush=True)
    sent = pipeline("sync", str(job.folder))  # the rest that the sender has not sent yet
    assert sent.code == 0, sent.err
    return job


def search(folder: Path, server: Server) -> list[Job]:
    """Train the runs of a search below one parent."""
    data = f"data.root={folder / 'data' / 'digits'}"
    words = ["digits", data, f"track.uri={server.uri}", "track.parent=search", "train.epochs=2", "run.threads=1"]
    jobs = [Job(folder / "search" / str(number), [*words, *changes.split()]) for number, changes in enumerate(SEARCH)]
    for job in jobs:
        result = job.run()
        assert result.code == 0, result.err
        sent = pipeline("sync", str(job.folder))
        assert sent.code == 0, sent.err
    return jobs


def newcomer(browser: Browser, scratch: Path, out: Path) -> None:
    """Train as `make train` does, in a terminal, and show the terminal and the run's web page."""
    command = [*torchrun(2), "train", "digits"]
    lines = ["<b>$ make train</b>", *render(in_terminal(command, scratch))]
    page = scratch / "terminal.html"
    page.write_text(TERMINAL % "\n".join(lines))
    browser.open(page.as_uri(), WIDTH, 100)
    size = browser.evaluate("(({width, height}) => [width, height])(document.body.firstChild.getBoundingClientRect())")
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
            row = cells[start : start + COLUMNS]
            text = "".join(f"<b>{html.escape(shown)}</b>" if bold else html.escape(shown) for shown, bold in row)
            yield text.replace("</b><b>", "").rstrip()


def capture_all(browser: Browser, server: Server, job: Job, out: Path) -> None:
    run = server.run_of(job)
    (model,) = run.outputs.model_outputs
    (data_set,) = run.inputs.dataset_inputs
    names = {
        "run": run.info.run_id,
        "model": model.model_id,
        "data": f"{data_set.dataset.name} ({data_set.dataset.digest})",
    }
    for page in PAGES:
        path, clicks = page.path.format(**names), (word.format(**names) for word in page.clicks)
        # Without the query MLflow opens its view of traces.
        url = f"{server.uri}/#/experiments/{run.info.experiment_id}/{path}?workflowType=machine_learning"
        screenshot = browser.capture(url, WIDTH, page.height, (ASSISTANT, *clicks), page.shows)
        save(page.name, screenshot, out)


def capture_comparison(browser: Browser, server: Server, jobs: list[Job], out: Path) -> None:
    runs = [server.run_of(job).info for job in jobs]
    query = f"runs={json.dumps([run.run_id for run in runs])}&experiments={json.dumps([runs[0].experiment_id])}"
    shows = (f"Comparing {len(jobs)} Runs", "run.seed")
    clicks = (ASSISTANT, "Show diff only")
    url = f"{server.uri}/#/compare-runs?{query}&workflowType=machine_learning"
    screenshot = browser.capture(url, WIDTH, 1250, clicks, shows)
    save("comparison", screenshot, out)


def save(name: str, screenshot: bytes, out: Path) -> None:
    """Write the screenshot with 256 colours, which is enough for these pages."""
    path = out / f"{name}.png"
    reduced = Image.open(io.BytesIO(screenshot)).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    reduced.save(path, optimize=True)
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise RuntimeError(f"{path} has {size:,} bytes, more than {MAX_BYTES:,}: reduce the page's height")
    print(f"{name:<12} {size:,} bytes", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Train the digits, and take screenshots of the terminal, of the run's page and of MLflow."
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", choices=SHOWN, help="one group of screenshots (default: all)")
    options = parser.parse_args()
    program = find_program()
    if program is None:
        print(NO_BROWSER, file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="screenshots-") as folder, contextlib.ExitStack() as running:
        scratch = Path(folder)
        browser = Browser(program, scratch / "profile")
        running.callback(browser.close)
        shown = (options.only,) if options.only else SHOWN
        if "newcomer" in shown:
            newcomer(browser, scratch, options.out)
        if "mlflow" in shown or "search" in shown:
            server = Server(scratch).start().wait_ready()
            running.callback(server.kill)
        if "search" in shown:
            capture_comparison(browser, server, search(scratch, server), options.out)
        if "mlflow" in shown:
            if subprocess.run([*on_host(HOSTS[0]), "true"], capture_output=True, check=False).returncode:
                print("two host names need unprivileged user namespaces, which are not available here", file=sys.stderr)
                return 2
            capture_all(browser, server, train(scratch / "two-nodes", server), options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

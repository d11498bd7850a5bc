"""Take screenshots of what a newcomer sees: `make screenshots` writes docs/images.

The first run is that of `make train`: its terminal, and its web page. The second run trains the
same recipe on two "nodes", which are two torchrun agents with different host names, and sends its
data to a real MLflow server, whose pages are shown.
"""

import contextlib
import html
import io
import math
import subprocess
import sys
import tempfile
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
TERMINAL = """<!DOCTYPE html><meta charset="utf-8"><style>
body { margin: 0; background: #fff; }
pre { display: inline-block; width: 100ch; white-space: pre-wrap; margin: 0; padding: 18px;
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
    tracked = (f"track.uri={server.uri}", "track.register=digits@best")
    words = ["digits", f"data.root={folder / 'data' / 'digits'}", *tracked, "train.epochs=6", "run.threads=1"]
    job = Job(folder / "runs" / "digits", words, nproc=2)
    print(two_nodes(job, HOSTS).done, flush=True)
    pipeline("sync", str(job.folder), code=0)  # the rest that the sender has not sent yet
    return job


def newcomer(browser: Browser, scratch: Path, out: Path) -> None:
    """Train as `make train` does, and show its output and the run's web page."""
    output = subprocess.run(
        [*torchrun(2), "train", "digits"], cwd=scratch, env=environment(OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True,
    ).stdout.replace(str(scratch), "/home/me/ddp-pipeline")  # fmt: skip
    page = scratch / "terminal.html"
    page.write_text(TERMINAL % f"<b>$ make train</b>\n{html.escape(output)}")
    browser.open(page.as_uri(), WIDTH, 100)
    box = "(({width, height}) => [width, height])(document.body.firstChild.getBoundingClientRect())"
    width, height = map(math.ceil, browser.evaluate(box))
    save("terminal", browser.capture(page.as_uri(), width, height, (), ("done step=",)), out)
    report = scratch / "runs" / "digits" / "report" / "index.html"
    save("report-page", browser.capture(report.as_uri(), 1200, 1250, (), ("Confusion",)), out)


def save(name: str, screenshot: bytes, out: Path) -> None:
    """Write the screenshot with 256 colours, which is enough for these pages."""
    reduced = Image.open(io.BytesIO(screenshot)).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    reduced.save(out / f"{name}.png", optimize=True)


def main(out: Path) -> None:
    program = find_program() or sys.exit(NO_BROWSER)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="screenshots-") as folder, contextlib.ExitStack() as running:
        scratch = Path(folder)
        browser = Browser(program, scratch / "profile")
        running.callback(browser.close)
        newcomer(browser, scratch, out)
        server = running.enter_context(Server(scratch))
        run = server.run_of(train(scratch / "two-nodes", server)).info
        for page in PAGES:
            path = page.path.format(run=run.run_id)
            # Without the query MLflow opens its view of traces.
            url = f"{server.uri}/#/experiments/{run.experiment_id}/{path}?workflowType=machine_learning"
            screenshot = browser.capture(url, WIDTH, page.height, (ASSISTANT, *page.clicks), page.shows)
            save(page.name, screenshot, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

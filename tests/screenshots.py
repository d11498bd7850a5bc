"""Take screenshots of a run in MLflow's pages: `make screenshots` writes docs/images.

The run trains the digits recipe on two "nodes", which are two torchrun agents with different host
names, and sends its data to a real MLflow server.
"""

import argparse
import contextlib
import io
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from browser import NO_BROWSER, Browser, find_program
from harness import Job, on_host, pipeline, two_nodes
from PIL import Image
from server import Server

HOSTS = ("node-0", "node-1")
WIDTH = 1400
ASSISTANT = "Close"
"""The button that closes the assistant panel, which MLflow opens on each page."""
MAX_BYTES = 200_000
"""Largest size of a screenshot."""


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


def train(folder: Path, server: Server) -> Job:
    data = f"data.root={folder / 'data' / 'digits'}"
    words = ["digits", data, f"track.uri={server.uri}", "track.register=digits@best", "train.epochs=6", "run.threads=1"]
    job = Job(folder / "runs" / "digits", words, nproc=2)
    print(two_nodes(job, HOSTS).done, flush=True)
    sent = pipeline("sync", str(job.folder))  # the rest that the sender has not sent yet
    assert sent.code == 0, sent.err
    return job


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
        print(f"{page.name:<10} {write(screenshot, out / f'{page.name}.png'):,} bytes", flush=True)


def write(screenshot: bytes, path: Path) -> int:
    """Write the screenshot with 256 colours, which is enough for these pages; return its bytes."""
    reduced = Image.open(io.BytesIO(screenshot)).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    reduced.save(path, optimize=True)
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise RuntimeError(f"{path} has {size:,} bytes, more than {MAX_BYTES:,}: reduce the page's height")
    return size


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Train the digits on two nodes and take screenshots of the run in MLflow."
    )
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    program = find_program()
    if program is None:
        print(NO_BROWSER, file=sys.stderr)
        return 2
    if subprocess.run([*on_host(HOSTS[0]), "true"], capture_output=True, check=False).returncode:
        print("two host names need unprivileged user namespaces, which are not available here", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="screenshots-") as scratch, contextlib.ExitStack() as running:
        server = Server(Path(scratch)).start()
        running.callback(server.kill)
        job = train(Path(scratch), server.wait_ready())
        browser = Browser(program, Path(scratch) / "profile")
        running.callback(browser.close)
        capture_all(browser, server, job, out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Pictures of a run in MLflow's pages, as a browser shows them: `make screenshots` writes docs/images.

The run is the digits recipe on two "nodes", two torchrun agents that see a host name of their own
each, sent to a real server while it trains. A page is taken once it has the words that it is to
show, and has stopped changing.
"""

import argparse
import contextlib
import io
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from browser import Browser
from harness import Job, on_host, pipeline, two_nodes
from PIL import Image
from server import Server

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
HOSTS = ("node-0", "node-1")
WIDTH = 1400
ASSISTANT = "Close"
"""A panel that MLflow opens beside each page, and what closes it."""
LARGEST = 200_000
"""Bytes of a picture."""


@dataclass(frozen=True)
class Page:
    name: str
    path: str
    """Of the experiment, with the run and the model to be filled in."""
    shows: tuple[str, ...]
    """Words that are there once it is complete."""
    height: int
    clicks: tuple[str, ...] = ()
    """What is clicked on first, by its words."""


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
    sent = pipeline("sync", str(job.folder))  # what a busy machine had no time for
    assert sent.code == 0, sent.err
    return job


def take_all(browser: Browser, server: Server, job: Job, out: Path) -> None:
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
        # without the ending MLflow opens its view of traces
        url = f"{server.uri}/#/experiments/{run.info.experiment_id}/{path}?workflowType=machine_learning"
        picture = browser.take(url, WIDTH, page.height, (ASSISTANT, *clicks), page.shows)
        print(f"{page.name:<10} {write(picture, out / f'{page.name}.png'):,} bytes", flush=True)


def write(picture: bytes, path: Path) -> int:
    """The picture in 256 colours, which pages have hardly more of; its bytes."""
    reduced = Image.open(io.BytesIO(picture)).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    reduced.save(path, optimize=True)
    size = path.stat().st_size
    if size > LARGEST:
        raise RuntimeError(f"{path} has {size:,} bytes, more than {LARGEST:,}: make the page lower")
    return size


def main() -> int:
    parser = argparse.ArgumentParser(description="Train the digits on two nodes and take MLflow's pages of the run.")
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        print(f"none of {', '.join(PROGRAMS)} is here: install Chromium", file=sys.stderr)
        return 2
    if subprocess.run([*on_host(HOSTS[0]), "true"], capture_output=True, check=False).returncode:
        print("this system gives its users no namespaces, so two nodes cannot be told apart", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="screenshots-") as scratch, contextlib.ExitStack() as running:
        server = Server(Path(scratch)).start()
        running.callback(server.kill)
        job = train(Path(scratch), server.wait_ready())
        browser = Browser(program, Path(scratch) / "profile")
        running.callback(browser.close)
        take_all(browser, server, job, out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

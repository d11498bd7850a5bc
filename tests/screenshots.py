"""Pictures of a run in MLflow's pages, as a browser shows them: `make screenshots` writes docs/images.

The run is the digits recipe on two "nodes", two torchrun agents that see a host name of their own each, sent to a real
server while it trains. A page is taken once it has the words that it is to show, and has stopped changing.
"""

import argparse
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
    Page("overview", "runs/{run}", ("To repeat it", "v1"), 1100),
    Page("curves", "runs/{run}/model-metrics", ("val/top1",), 1100, clicks=("time",)),
    Page("images", "runs/{run}/artifacts/report/confusion.png", ("confusion.png",), 800),
    Page("model", "models/{model}", ("val/top1",), 1000),
    Page("dataset", "runs/{run}", ("val images",), 700, clicks=("{data}",)),
    Page("system", "runs/{run}/system-metrics", tuple(f"system/{host}/rss_mib" for host in HOSTS), 1100),
)


def take_all(program: str, scratch: Path, out: Path) -> None:
    server = Server(scratch).start()
    try:
        server.wait_ready()
        data = f"data.root={scratch / 'data' / 'digits'}"
        words = ["digits", data, f"track.uri={server.uri}", "track.register=digits@best", "train.epochs=6"]
        job = Job(scratch / "runs" / "digits", words, nproc=2)
        print(two_nodes(job, HOSTS).done, flush=True)
        sent = pipeline("sync", str(job.folder))  # what a busy machine had no time for
        assert sent.code == 0, sent.err
        run = server.run_of(job)
        (model,) = run.outputs.model_outputs
        (data_set,) = run.inputs.dataset_inputs
        names = {
            "run": run.info.run_id,
            "model": model.model_id,
            "data": f"{data_set.dataset.name} ({data_set.dataset.digest})",
        }
        experiment = f"{server.uri}/#/experiments/{run.info.experiment_id}"
        browser = Browser(program, scratch / "profile")
        try:
            for page in PAGES:
                path, clicks = page.path.format(**names), (ASSISTANT, *(words.format(**names) for words in page.clicks))
                # without the ending MLflow opens its view of traces
                url = f"{experiment}/{path}?workflowType=machine_learning"
                picture = browser.take(url, WIDTH, page.height, clicks, page.shows)
                written = write(picture, out / f"{page.name}.png")
                print(f"{page.name:<10} {written:,} bytes", flush=True)
        finally:
            browser.close()
    finally:
        server.kill()


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
    with tempfile.TemporaryDirectory(prefix="screenshots-") as scratch:
        take_all(program, Path(scratch), out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

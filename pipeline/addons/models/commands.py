"""The commands evaluate, predict and export."""

import argparse
from pathlib import Path
from typing import Any

from pipeline.cli import arguments
from pipeline.cli.arguments import Commands, Parser, add_command, add_overrides, path_or_uri
from pipeline.lazy import addon

_TARGET_HELP = "a run's folder (its last checkpoint) or a checkpoint file"


def add_commands(commands: Commands) -> None:
    parser = add_command(
        commands, "evaluate",
        lambda given: addon("models.evaluate").evaluate(_target_of(given), given.overrides, given.nproc),
        "evaluate a checkpoint on all validation images",
        "Evaluate a checkpoint on the validation images and print the 'done' line of 'pipeline train'. Every"
        " image counts exactly once, at any number of processes.",
        "pipeline evaluate runs/digits", "pipeline evaluate runs/digits --best --nproc 2",
    )  # fmt: skip
    parser.add_argument("target", type=path_or_uri, metavar="RUN_DIR|CHECKPOINT", help=_TARGET_HELP)
    add_overrides(parser)
    _add_best(parser)
    arguments.add_trust(parser)
    arguments.add_nproc(parser)

    parser = add_command(
        commands, "predict", _predict, "classify images: the five likeliest classes and their probabilities",
        "Classify each IMAGE, and each image in a folder, with the model of a checkpoint, of a run's last"
        " checkpoint, or of MLflow's model registry (at MLFLOW_TRACKING_URI, or else in runs/mlflow.db)."
        " Images that cannot be decoded are named and skipped.",
        "pipeline predict runs/digits --best photo.png",
        "pipeline predict models:/digits@best photos/ --json",
        "pipeline predict runs/digits photos/ --csv --out classes.csv",
    )  # fmt: skip
    add = parser.add_argument
    add("target", type=path_or_uri, metavar="CHECKPOINT|RUN_DIR|models:/NAME@ALIAS", help="the model to use")
    add("images", nargs="+", type=path_or_uri, metavar="IMAGE", help="image files, or folders of them")
    _add_best(parser)
    arguments.add_trust(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--csv", action="store_true", help="print a row for each image as it is classified")
    add("--out", type=arguments.path, metavar="FILE", help="add the rows of --csv that this file lacks")

    parser = add_command(
        commands, "export", _export, "write the model in another format and check it on validation images",
        "Write the model of a checkpoint, or of a run's last checkpoint, to export/ in the run's folder."
        " torch.export and onnx map a decoded picture of any size, uint8 [H, W, 3], to probabilities;"
        " safetensors has only the weights.",
        "pipeline export runs/digits --best --to onnx",
    )  # fmt: skip
    add = parser.add_argument
    add("target", type=path_or_uri, metavar="RUN_DIR|CHECKPOINT", help=_TARGET_HELP)
    add_overrides(parser)
    _add_best(parser)
    arguments.add_trust(parser)
    formats = ("torch.export", "onnx", "safetensors")
    add("--to", required=True, choices=formats, help="format of the exported file")
    add("--pixels", action="store_true", help="map float32 pixels, [N, 3, side, side], 0 to 255, instead")
    add("--out", type=arguments.path, metavar="FILE", help="write to this file instead")


def _add_best(parser: Parser) -> None:
    help = "use the run's best checkpoint (the highest top-1 or mAP in validation) instead of the last"
    parser.add_argument("--best", action="store_true", help=help)


def _target_of(options: argparse.Namespace) -> str:
    return str(addon("run.receipt").best_checkpoint(options.target) if options.best else options.target)


def _predict(options: argparse.Namespace) -> Any:
    inputs = addon("models.inputs")
    if options.out and not options.csv:
        options.parser.error("--out goes with --csv")
    inputs.check_model(options.target)
    inputs.check_output(options.out)
    for image in options.images:
        inputs.check_exists(image, "give image files, or folders with images")
    if options.csv:
        return addon("models.predict").predict_csv(_target_of(options), options.images, options.out)
    return addon("models.predict").predict(_target_of(options), options.images, as_json=options.json)


def _export(options: argparse.Namespace) -> Any:
    inputs, target = addon("models.inputs"), Path(_target_of(options))
    inputs.check_target(target)
    inputs.check_output(options.out)
    pixels = options.pixels or options.to == "safetensors"
    words = options.overrides
    return addon("models.export").export(target, options.to, options.out, words, takes_pixels=pixels)

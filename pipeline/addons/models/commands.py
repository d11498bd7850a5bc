"""The commands predict and export."""

import argparse
from pathlib import Path

from pipeline.cli import arguments
from pipeline.cli.arguments import Commands, add_command, add_overrides, add_trust, path_or_uri


def add_commands(commands: Commands) -> None:
    parser = add_command(
        commands, "predict", _predict, "classify images: the five likeliest classes and their probabilities",
        "Classify each IMAGE, and each image in a folder, with the model of a checkpoint, of a run's last"
        " checkpoint, or of MLflow's model registry (at MLFLOW_TRACKING_URI, or else in runs/mlflow.db)."
        " Images that cannot be decoded are named and skipped.",
        "pipeline predict runs/digits --best photo.png",
        "pipeline predict models:/digits@best photos/ --json",
    )  # fmt: skip
    add = parser.add_argument
    add("target", type=path_or_uri, metavar="CHECKPOINT|RUN_DIR|models:/NAME@ALIAS", help="the model to use")
    add("images", nargs="+", type=path_or_uri, metavar="IMAGE", help="image files, or folders of them")
    arguments.add_best(parser)
    add_trust(parser)
    add("--json", action="store_true", help="print JSON")

    parser = add_command(
        commands, "export", _export, "write the model in another format and check it on validation images",
        "Write the model of a checkpoint, or of a run's last checkpoint, to export/ in the run's folder."
        " torch.export and onnx map pixels from 0 to 255 to probabilities; safetensors has only the weights.",
        "pipeline export runs/digits --best --to onnx",
    )  # fmt: skip
    add = parser.add_argument
    add("target", type=path_or_uri, metavar="RUN_DIR|CHECKPOINT", help=arguments.TARGET_HELP)
    add_overrides(parser)
    arguments.add_best(parser)
    add_trust(parser)
    formats = ("torch.export", "onnx", "safetensors")
    add("--to", required=True, choices=formats, help="format of the exported file")
    add("--out", type=arguments.path, metavar="FILE", help="write to this file instead")


def _predict(options: argparse.Namespace) -> str:
    from pipeline.addons.models import inputs

    inputs.check_model(options.target)
    for path in options.images:
        inputs.check_exists(path, "give image files, or folders with images")

    from pipeline.addons.models import predict

    return predict.predict(arguments.target_of(options), options.images, as_json=options.json)


def _export(options: argparse.Namespace) -> str:
    from pipeline.addons.models import inputs

    target = Path(arguments.target_of(options))
    inputs.check_target(target)
    inputs.check_output(options.out)

    from pipeline.addons.models import export

    return export.export(target, options.to, options.out, options.overrides)

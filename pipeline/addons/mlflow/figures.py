"""The figures of each evaluation, as images that MLflow shows by step."""

import tempfile
from pathlib import Path

from pipeline.addons.mlflow.connection import log, root_cause
from pipeline.addons.mlflow.run import MlflowRun, file_sizes
from pipeline.addons.report.evaluations import saved_evaluations, step_of_evaluation
from pipeline.addons.report.figures import EVALUATION_FIGURES, draw_evaluation


def send_figures(run: MlflowRun) -> None:
    """Draw and send the figures of the run's evaluations, unless the server has them."""
    sent = file_sizes(run.artifact_uri, "images")
    for evaluation in saved_evaluations(run.folder.report):
        step = step_of_evaluation(evaluation)
        for name in EVALUATION_FIGURES:
            if not any(image.startswith(f"{name}+step+{step}+") for image in sent):
                _send_figure(run, name, evaluation, step)


def _send_figure(run: MlflowRun, name: str, evaluation: Path, step: int) -> None:
    from PIL import Image

    evaluated_at = int(1000 * evaluation.stat().st_mtime)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "figure.png"
        try:
            draw_evaluation(name, evaluation, path)
        except Exception as error:
            log(f"{name} of step {step} is not shown: {root_cause(error)}")
        if path.exists():  # an evaluation without mistakes has no figure of them
            with Image.open(path) as image:
                run.client.log_image(
                    run.run_id, image.convert("RGB"), key=name, step=step, timestamp=evaluated_at
                )

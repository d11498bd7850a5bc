"""`make ui` opens on the newest run."""

import json
import os
from pathlib import Path

from ui import address


def test_the_address_is_that_of_the_newest_run_in_the_database(tmp_path: Path) -> None:
    assert address(tmp_path, "5001") == "http://127.0.0.1:5001/#/experiments?workflowType=machine_learning"
    own, other = f"sqlite:///{tmp_path}/mlflow.db", "https://mlflow.example.org"
    for age, (name, server) in enumerate((("elsewhere", other), ("new", own), ("old", own))):
        (tmp_path / name).mkdir()
        sent = tmp_path / name / "mlflow.json"
        sent.write_text(json.dumps({server: {"run_id": f"{name}-id", "experiment_id": "1", "offset": 9}}))
        os.utime(sent, (1000 - age, 1000 - age))
    page = "experiments/1/runs/new-id?workflowType=machine_learning"
    assert address(tmp_path, "5000") == f"http://127.0.0.1:5000/#/{page}"

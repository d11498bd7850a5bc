"""Any model: timm's and one's own resume to the bit, and only code that the user named runs."""

import hashlib
import json
import re
import sys
from pathlib import Path

import harness
import pytest
import timm
import torch
from harness import Job, assert_resumes, pipeline, plan_of, quick
from mlflow import MlflowClient
from safetensors.torch import load_file, save_file
from test_security import Payload
from torch import nn
from torchvision import models

from pipeline.addons.models import pretrained
from pipeline.addons.models.functions import meta_model
from pipeline.addons.ops.model import check_model_builds, check_passes
from pipeline.config.load import from_yaml, load
from pipeline.config.sections import Model, Optimizer
from pipeline.errors import RequestError
from pipeline.model.architectures import build
from pipeline.model.weights import load_weights
from pipeline.plan import DataSize
from pipeline.train.optimizer import parameter_groups
from pipeline.world import World

FAMILIES = {
    "convnext_atto": {"drop_path_rate": 0.1}, "convnextv2_atto": {},
    "deit_tiny_distilled_patch16_224": {"img_size": 32}, "dla46_c": {}, "edgenext_xx_small": {},
    "efficientnet_lite0": {"drop_rate": 0.2}, "efficientvit_b0": {},
    "eva02_tiny_patch14_224": {"img_size": 56}, "ghostnet_050": {}, "gmlp_ti16_224": {"img_size": 32},
    "hgnetv2_b0": {}, "levit_128s": {"img_size": 64}, "mambaout_femto": {}, "mobilenetv3_small_050": {},
    "mobilenetv4_conv_small": {}, "mobilevit_xxs": {"drop_path_rate": 0.1}, "pit_ti_224": {"img_size": 64},
    "regnety_002": {}, "resnet10t": {}, "rexnet_100": {}, "starnet_s1": {},
    "swin_tiny_patch4_window7_224": {"img_size": 32, "depths": [1, 1, 1, 1]},
    "vit_tiny_patch16_224": {"img_size": 32, "drop_path_rate": 0.2, "proj_drop_rate": 0.1},
    "xcit_nano_12_p16_224": {},
}  # fmt: skip
"""timm's architectures, a family each, with the arguments that fit them to small images."""
QUICK, FULL = "vit_tiny_patch16_224", "mobilenetv3_small_050"

NET = """\
import os
from pathlib import Path

from torch import nn

if "RAN" in os.environ:
    Path(os.environ["RAN"]).touch()


class Net(nn.Module):
    def __init__(self, num_classes, width, drop):
        super().__init__()
        same = nn.Conv2d(width, width, 1, bias=False), nn.Conv2d(width, width, 1, bias=False)
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU(), *same)
        self.stem[4].weight = self.stem[3].weight
        self.drop = nn.Dropout(drop)
        self.head = nn.Linear(width, num_classes)

    def forward(self, images):
        return self.head(self.drop(self.stem(images).mean((2, 3))))


def net(num_classes, width=8, drop=0.2):
    return Net(num_classes, width, drop)


def features(num_classes):
    return nn.Conv2d(3, num_classes, 3)


def groups_of_four(module, args):
    assert not module.training or len(args[0]) % 4 == 0, "batch norm over groups of four"


def idle(num_classes, needs_values=False, detached=False):
    net = Net(num_classes, 8, 0.2)
    net.idle = nn.Linear(3, 3)
    if needs_values:
        net.stem.register_forward_hook(lambda module, args, output: print(float(output.detach().sum())))
    else:
        net.stem.register_forward_pre_hook(groups_of_four)
    if detached:
        net.head.register_forward_hook(lambda module, args, output: output.detach())
    return net


LIMIT = 3
"""
TRAINING = ("data.source=synthetic", "data.num_classes=4", "data.num_images=240", "data.workers=0",
            "batch.global=12", "run.device=cpu", "run.deterministic=true", "run.trace=true", "track.uri=none",
            "track.report=false", "checkpoint.every=8 steps", "evaluate.every=20 steps", "train.max_steps=8",
            "augment.size=32", "optimizer.lr=0.01")  # fmt: skip


def words(arch: str, args: dict[str, object]) -> list[str]:
    size = str(args.get("img_size", 32 if "patch" in arch else 64))
    given = [f"model.args.{name}={json.dumps(value)}" for name, value in args.items()]
    sizes = [f"augment.size={size}", f"evaluate.size={size}"]
    optimizer = {QUICK: "lamb", FULL: "muon"}.get(arch, "sgd")
    return ["digits", *TRAINING, f"model.arch=timm/{arch}", f"optimizer.name={optimizer}", *given, *sizes]


@pytest.mark.parametrize(
    "arch",
    [QUICK, pytest.param(FULL, marks=pytest.mark.full),
     *(pytest.param(name, marks=pytest.mark.long) for name in FAMILIES if name not in (QUICK, FULL))],
)  # fmt: skip
def test_a_model_of_timm_resumes_is_exported_and_predicts(arch: str, tmp_path: Path, image: Path) -> None:
    folder = str(assert_resumes(tmp_path, words(arch, FAMILIES[arch]), 5, nproc=1).folder)
    quick("export", folder, "--to", "torch.export", code=0)
    quick("predict", folder, str(image), code=0)


def test_every_classifier_makes_a_pass(full: bool) -> None:
    """All of torchvision, and one of each family of timm, on the meta device; else every tenth."""
    families = [timm.list_models(module=family) for family in timm.list_modules()]
    names = [*models.list_models(module=models), *(f"timm/{names[0]}" for names in families if names)]
    for arch in names[:: 1 if full else 10]:
        default = timm.get_pretrained_cfg(arch.removeprefix("timm/")) if arch.startswith("timm/") else None
        size = default.input_size[1] if default else 299 if arch.startswith("inception") else 224
        model = meta_model(Model(arch=arch), 7)
        with torch.device("meta"), torch.no_grad():
            load_weights(model, dict(model.state_dict()))  # a plain dict has no versions
            assert model(torch.empty(2, 3, size, size)).shape == (2, 7), arch


def test_a_model_that_needs_versions_trains(tmp_path: Path, image: Path) -> None:
    arguments = ["digits", *TRAINING, "model.arch=mnasnet0_5", "train.max_steps=3", "train.ema=0.9"]
    plain = Job(tmp_path / "run", arguments).finished()
    for run in (assert_resumes(tmp_path, [*arguments, "parallel=fsdp"], 2), plain):
        for part in ("model", "average"):
            build(Model(arch="mnasnet0_5"), 4).load_state_dict(run.contents()[part])  # by torch alone
    folder, weights = str(run.folder), str(tmp_path / "weights.safetensors")
    for command in (
        ["evaluate", folder], ["predict", folder, str(image)],
        ["export", folder, "--to", "safetensors", "--out", weights],
        ["train", *arguments, f"model.init={folder}", f"run.dir={tmp_path / 'from-run'}"],
        ["train", *arguments, f"model.init={weights}", f"run.dir={tmp_path / 'from-file'}"],
    ):  # fmt: skip
        quick(*command, code=0)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a module of the user's own."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "mynet.py").write_text(NET)
    monkeypatch.delitem(sys.modules, "mynet", raising=False)  # of another test
    return folder


def test_only_a_function_that_the_user_names_runs(package: Path, tmp_path: Path, image: Path) -> None:
    own = ["digits", *TRAINING, "model.arch=mynet:net", "model.args.width=6"]
    job = Job(tmp_path / "run", own, nproc=2, env={"PYTHONPATH": str(package)})
    expected = job.run().done
    assert job.contents()["model"]["head.weight"].shape == (4, 6)
    (facts,) = json.loads((job.folder / "receipt.json").read_text())["starts"]
    digest = hashlib.sha256((package / "mynet.py").read_bytes()).hexdigest()
    assert (facts["model_file"], facts["model_sha256"]) == ("mynet.py", digest)

    run, ran, exported = str(job.folder), tmp_path / "ran", tmp_path / "weights.safetensors"
    for command in (
        ["evaluate", run], ["predict", run, str(image)], ["verify", run, "--steps", "16"],
        ["export", run, "--to", "safetensors", "--out", str(exported)],
    ):  # fmt: skip
        refused = quick(*command, cwd=package, code=2, PYTHONPATH=str(package), RAN=str(ran))
        assert "runs only with --trust mynet:net" in refused.error
        assert not ran.exists(), command
        # from the folder that holds it, without PYTHONPATH
        start = pipeline if command[0] == "predict" else quick
        allowed = start(*command, "--trust", "mynet:net", cwd=package, RAN=str(ran), code=0)
        ran.unlink()
        if command[0] == "evaluate":
            assert allowed.done["weights"] == expected["weights"]
    tied = load_file(exported)
    assert torch.equal(tied["stem.3.weight"], tied["stem.4.weight"])
    named = quick("evaluate", run, "model.arch=mynet:net", cwd=package)
    assert named.done["weights"] == expected["weights"], named.err
    quick("evaluate", run, "--trust", "mynet:other", cwd=package, code=2)


def test_a_model_of_ones_own_reaches_the_registry(package: Path, tmp_path: Path, image: Path) -> None:
    first, second = (f"sqlite:///{tmp_path}/{name}.db" for name in ("first", "second"))
    words = ["digits", *TRAINING, "model.arch=mynet:net", "train.max_steps=1", "track.register=own@best"]
    job = Job(tmp_path / "run", [*words, f"track.uri={first}"], env={"PYTHONPATH": str(package)})
    assert "MLflow" not in job.run().err
    job.arguments.append("train.max_steps=2")
    sync = ("sync", str(job.finished().folder))
    refused = quick(*sync, code=2, MLFLOW_TRACKING_URI=second, PYTHONPATH=str(package))
    assert "runs only with --trust mynet:net" in refused.error
    (run,) = MlflowClient(second).search_runs(["1"])
    steps = [point.step for point in MlflowClient(second).get_metric_history(run.info.run_id, "val/top1")]
    assert (run.info.status, steps) == ("FINISHED", [1, 2]), "the rest is sent"
    quick(*sync, "--trust", "mynet:net", cwd=package, code=0, MLFLOW_TRACKING_URI=second)
    registered = ("predict", "models:/own@best", str(image), "--json")
    refused = quick(*registered, cwd=package, code=2, MLFLOW_TRACKING_URI=first)
    assert "runs only with --trust mynet:net" in refused.error
    tops = []
    for uri, command in (
        (first, ("predict", str(job.folder), str(image), "--json", "--best")), (first, registered),
        (second, registered),
    ):  # fmt: skip
        allowed = quick(*command, "--trust", "mynet:net", cwd=package, MLFLOW_TRACKING_URI=uri)
        tops.append(json.loads(allowed.out)["predictions"][0]["top"])
    assert tops[0] == tops[1] == tops[2]


def test_wrong_models_are_refused_in_one_line(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(package)
    for words, says in {
        "mynet:nett": "did you mean net?",
        "mynet:features": "returns (4, 10, 30, 30) for 4 images, not logits of shape (4, 10)",
        "nothere:net": "cannot be imported (ModuleNotFoundError",
        "mynet:LIMIT": "mynet has no function LIMIT",
        "timm/resnet18x": "did you mean ",
        "timm/hf-hub:timm/resnet18": "give package.module:function",
        "timm/resnet18 model.args.pretrained=true": "model.args.pretrained cannot be set",
        "timm/vit_tiny_patch16_224": "raise augment.size or set model.args.img_size",
        "squeezenet1_1 evaluate.size=8": "raise evaluate.size",
        "resnet18 model.args.weights=DEFAULT": "model.args.weights cannot be set",
        "resnet18 model.args.nonsense=1": "correct its arguments",
    }.items():
        config = load("digits", ["data.root=x", *f"model.arch={words}".split()])
        assert says in harness.refused(lambda c=config: check_passes(c.model, 10, 4, [32], c.evaluate.size))


def test_a_weight_without_a_gradient_is_refused(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(package)

    def check(arch: str, world: int, *more: str) -> None:
        own = (f"model.arch={arch}", "augment.size=32", "batch.global=8", "run.device=cpu")
        data = DataSize(80, 8, 4)
        config, plan = plan_of("data.source=synthetic", *own, *more, data=data, size=world)
        check_model_builds(config, plan, World(size=world, local_size=world), is_resumed=True)

    for values in ("false", "true"):
        words = ("mynet:idle", 2, f"model.args.needs_values={values}")
        with pytest.raises(RequestError, match=r"mynet:idle does not use idle\.weight, idle\.bias"):
            check(*words)
        check(*words, "model.freeze=idle", "model.init=weights.pth")
        check(*words, "run.exact=true", "exact.shards=2")
    check("mynet:idle", 1)
    check("mynet:net", 2)
    check("mynet:idle", 2, "model.args.detached=true")  # no gradient at all: DDP itself reports it


def test_an_argument_has_the_type_that_its_text_means_also_after_a_round_trip() -> None:
    values = {"0.1": 0.1, "12": 12, "1e-3": 1e-3, "true": True, "none": None, "[2, 2]": [2, 2], "avg": "avg"}
    for given, value in values.items():
        config = load("digits", ["data.root=x", f"model.args.x={given}"])
        assert config.model.args == {"x": value}
        assert type(config.model.args["x"]) is type(value)
        assert from_yaml(config.to_yaml(), "test").model == config.model
    for given in ("model.args=3", "model.args.x={a: 1}", "model.args.1x=3"):
        refused = harness.refused(lambda given=given: load("digits", ["data.root=x", given]))
        assert re.match(r"model\.args=.* is not allowed", refused)


def test_a_model_names_the_weights_that_do_not_decay() -> None:
    def decayed(model: nn.Module) -> set[str]:
        params = {id(param) for param in parameter_groups(model, Optimizer())[0]["params"]}
        return {name for name, param in model.named_parameters() if id(param) in params}

    xcit = meta_model(Model(arch="timm/xcit_nano_12_p16_224"), 10)
    assert not any(name.startswith("pos_embed.") for name in decayed(xcit))
    model = nn.Bilinear(2, 3, 4)
    model.bias = nn.Parameter(torch.zeros(4, 1, 1))
    assert decayed(model) == {"weight"}
    model.no_weight_decay = {"w*"}  # type: ignore[assignment]
    assert decayed(model) == set()


def test_first_weights_come_from_a_file_which_executes_nothing(tmp_path: Path) -> None:
    weights = build(Model(arch="timm/resnet10t"), 1000).state_dict()
    save_file(weights, tmp_path / "weights.safetensors")
    wrapped = {"epoch": 3, "state_dict": {f"module.{name}": value for name, value in weights.items()}}
    torch.save(wrapped, tmp_path / "wrapped.pth")
    torch.save(weights, tmp_path / "legacy.pth", _use_new_zipfile_serialization=False)
    for file in ("weights.safetensors", "wrapped.pth", "legacy.pth"):
        options = Model(arch="timm/resnet10t", init=str(tmp_path / file))
        found = pretrained.read(options, meta_model(options, 10))
        assert weights.keys() - found.keys() == {"fc.weight", "fc.bias"}
        assert all(torch.equal(found[name], weights[name]) for name in found)

    torch.save({"weights": Payload(tmp_path / "ran")}, tmp_path / "evil.pth")
    (tmp_path / "text.safetensors").write_text("no weights")
    for file in ("evil.pth", "text.safetensors"):
        arguments = [*words("resnet10t", {}), f"model.init={tmp_path / file}", f"run.dir={tmp_path / 'run'}"]
        assert f"{file} is not a state dict" in quick("train", *arguments, code=4).error
    assert not (tmp_path / "ran").exists()

"""A wrong request ends with one line and its exit code, before anything starts."""

import errno
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from harness import SMALL, Job, MakeJob, before_each, free_port, pipeline, quick, run_together
from place import SMALL as IMAGES
from place import Place

from pipeline.addons.ops.keys import all_keys
from pipeline.cli.main import main, parse
from pipeline.operate import start

RECIPES = {
    "empty": "", "dotted": "data: {source: digits}\ntrain.epochs: 3\n",
    "init": "data: {source: digits}\nmodel: {arch: resnet18, init: DEFAULT}\n",
    "several": "data: {source: table, table: several.csv, root: photos}\n",
}  # fmt: skip

FOLDERS = {
    "few": ["a/1.jpg", "b/1.jpg"], "texts": ["train/a/1.txt", "train/b/1.txt", "val/a/1.txt", "val/b/1.txt"],
    "differ": ["train/a/1.jpg", "train/b/1.jpg", "val/a/1.jpg", "val/c/1.jpg"],
    "folder-image": ["train/a/1.jpg", "train/b/1.jpg", "train/b/000.jpg/x", "val/a/1.jpg", "val/b/1.jpg"],
    "torn-pack": ["pack.json", "pack.index"], "empty-run": ["config.yaml"], "bare": ["1.jpg"],
    "flat": ["train/a/1.jpg", "train/b/1.jpg", "val/1.jpg"], "one-class": ["train/a/1.jpg", "val/a/1.jpg"],
    "sums": ["train/a/1.jpg", "train/b/1.jpg", "val/a/1.jpg", "val/b/1.jpg", "SHA256SUMS"],
}  # fmt: skip

# A request; the flag, key, value or path that its line names; the exit code, if it is not 2.
# LONG is a path that is too long for every file system: looking it up is an error, even for root.
WRONG = """
train | RECIPE
train digits train.epochs 3 | 'train.epochs' is not key=value
train digits --epochs=3 | --epochs
train digits --quite | --quiet
train digits --nproc 2 --numa-binding node | torchrun
train digits batch.global=2000 | batch.global
train digits batch.global=97 batch.accumulate=2 | 96 or 98
train digits run.dir=/proc/x | run.dir=/proc/x
train digits run.dir=notes.txt/run | run.dir=notes.txt/run
train digits run.dir=a%41b/run | a%41b/mlflow.db
train digits model.arch=resnet19 | resnet18
train digits model.init=nosuch | model.init=nosuch
train digits model.teacher=nosuch | nosuch
train digits model.teacher=runs/done | where the data has '0'
train digits train.watch=val/map | train.watch=val/map
train digits train.class_weights=notes.txt | notes.txt
train digits train.class_weights=few.json | '9'
train digits train.class_weights=negative.json | '-1'
train digits train.class_weights=unknown.json | 'ten'
train digits 'train.class_weights={0: 1}' | '1' has no weight
train digits train.patience=0 | train.patience=0
train digits train.distill=[2,1] | train.distill=2
train digits optimizer.layer_decay=1.5 | optimizer.layer_decay=1.5
train digits optimizer.head_lr=1 parallel=stages | head_lr
train digits 'model.freeze_until=1 epoch' | model.freeze
train digits model.init=timm | model.init=timm
train digits model.arch=airbench94 model.init=torchvision | airbench94
train digits model.teacher=x train.loss=bce | train.loss=ce
train digits model.init=models:/x | runs/mlflow.db
train digits model.init=models:/nowhere@best | models:/nowhere@best
train digits run.dir=s3://bucket/x | run.dir=s3://bucket/x
train digits data.source=synthetic data.num_images=8 | data.num_images=8
train digits model.freeze=backbone | model.init
train init.yaml model.freeze=layer5 | did you mean layer
train init.yaml model.freeze=, | no module ''
train init.yaml model.freeze=conv1,bn1,layer1,layer2,layer3,layer4,fc | leaves nothing to train
train init.yaml model.init=IMAGENET1K_V9 | IMAGENET1K_V1
train several.yaml data.balance=sqrt | data.balance
train digits track.uri=htp://foo | track.uri=htp://foo
train digits track.uri=http://h:99999 | track.uri=http://h:99999
train digits 'track.uri=postgresql://u:pass word@h/db' | %20
train digits track.register=digits@v1 | keeps the aliases latest and v1, v2
train digits track.experiment=LONGLONG | up to 500 characters
train digits track.uri=sqlite:///a?b/ml.db | track.uri=sqlite:///a?b/ml.db
train digits model.batchnorm=sync --nproc 2 | model.batchnorm
train digits augment.scale=[0.9,0.1] | augment.scale=[0.9, 0.1]
train digits augment.first_size=16 'augment.growth=[1 epoch,99 epochs]' | augment.growth
train digits run.exact=true train.precision=fp16 | train.precision=fp16
train digits run.exact=true parallel=fsdp | parallel=fsdp
train digits parallel=stages stages.count=3 | stages.count=3
train digits parallel=dataparallel --nproc 2 | parallel=dataparallel
train digits augment.mixup=0.2 batch.global=5 | an even number
train digits model.arch=alexnet augment.size=32 | augment.size
train digits model.arch=inception_v3 batch.global=8 | augment.size
train digits batch.global=1 | augment.size
train digits run.dir=runs/done train.epochs=1 | train.epochs: 2 -> 1
train digits run.dir=data/digits data.root=data/digits | data.root
train resnet50-90 data.workers=0 | 'pipeline data import imagenet ARCHIVES data/imagenet'
train digits data.source=folder data.root=nowhere | data.root=nowhere
train digits data.source=pack data.root=s3://B/data | s3://B/data
train digits data.source=folder data.root=packed | data.source=pack
train digits data.source=pack data.root=photos | 'pipeline data pack photos photos-pack'
train digits data.source=pack data.root=torn-pack | torn-pack
train digits data.source=folder data.root=differ | c in val/ only
train digits data.source=folder data.root=bare | data.root=bare holds no folders
train digits data.source=folder data.root=flat | val/ of data.root=flat holds no folders
train digits data.source=folder data.root=one-class | data.root=one-class holds one class folder, a/
train digits data.source=folder data.root=sums | SHA256SUMS line 1 is not a sum and a file name
train digits data.source=folder data.root=texts | holds no image
train digits data.source=folder data.root=folder-image | 000.jpg
train digits data.source=folder data.root=few | no image to validate on
train empty.yaml | data.root
train dotted.yaml | train: {epochs: 3}
doctor digits --world=two | --world
evaluate models:/digits@best | 'pipeline predict'
evaluate runs/done/checkpoints/none.pt --best | --best
evaluate runs/done model.arch=resnet18 | model.arch=resnet18
predict models:/digits@best photos | MLFLOW_TRACKING_URI
predict runs/done texts | no image in
predict runs/done photos nosuch.jpg | nosuch.jpg
predict runs/done photos --sheet out.png | --sheet
predict runs/done photos --out=out.csv | --csv
predict runs/done photos --csv --json | --json
predict runs/done photos --csv --out=nosuch/out.csv | nosuch
export runs/done --to=onnx --out=nosuch/model.onnx | nosuch
verify photos | photos
sync nosuch | nosuch
bench train --only plain | benchmarks/NAME.py
doctor digits --gang | nccl-tests
doctor digits run.device=cuda | use run.device=cpu, or auto
doctor digits model.arch=timm/dm_nfnet_f0 parallel=fsdp --world 2 | stages.0.0.skipinit_gain
runs | 'pipeline report RUN_DIR'
completion bash | 'register-python-argcomplete pipeline'
trian digits | 'trian'
data make cats | 'cats'
data import imagenet photos out --pack raw=4 | level raw=4 is not allowed
data import imagenet photos out | ILSVRC2012_img_train.tar
data pack photos out --val-split=1 | --val-split
data pack photos out --level max-side=500 | level max-side=500 is not allowed: lossless, max-side=
data pack photos out --level max-side=0,q=90 | level max-side=0,q=90 is not allowed
data pack photos out --level max-side=500,q=101 | level max-side=500,q=101 is not allowed
data pack packed out | packed
data check differ --json | c in val/ only
rehearse digits --nodes 2 --kill 9@3 | --nodes 2
rehearse digits --nodes 2 run.resume=never | run.resume=never
k8s recover | this is not a pod with a service account
k8s render --nodes=7 | 91 or 98
k8s render digits run.resume=never | run.resume=never
k8s render --namespace=a.b | --namespace
k8s render --store-endpoint=http://me:pass@host.example | --store-endpoint
k8s render --cpu --gpus 2 | --cpu
k8s render --rdma rdma/hca | kustomization
k8s render --gang native | --queue
k8s render digits checkpoint.mirror=s3://bucket/run | --store s3://BUCKET/PREFIX
k8s render resnet50-90 --store s3://bucket --nodes 1 --gpus 8 | 'pipeline data pack data/imagenet s3://bucket/data'
k8s render --store s3://bucket --store-endpoint http://minio:9000 | http://minio.NAMESPACE.svc:9000
k8s render digits model.init=DEFAULT model.freeze=nose | 'nose'
k8s render --code photos | __init__.py
k8s render --code nosuch | nosuch
MLFLOW_TRACKING_URI=htp://foo train digits | MLFLOW_TRACKING_URI=htp://foo
RANK=1 WORLD_SIZE=x train digits | WORLD_SIZE=x
RANK=8 WORLD_SIZE=8 train digits | RANK=8
RANK=0 WORLD_SIZE=2 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2 train digits | LOCAL_RANK=2
RANK=0 WORLD_SIZE=2 train digits | INIT_METHOD
RANK=1 WORLD_SIZE=2 INIT_METHOD=127.0.0.1:29500 train digits | INIT_METHOD=127.0.0.1:29500
RANK=1 WORLD_SIZE=2 INIT_METHOD=tcp://localhost:99999 train digits | INIT_METHOD=tcp://localhost:99999
RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=65536 train digits | MASTER_PORT=65536
WORLD_SIZE=2 LOCAL_RANK= evaluate runs/done | RANK=
RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 train digits --nproc 2 | --nproc 2
PET_NNODES=0 doctor digits | PET_NNODES='0'
PET_NPROC_PER_NODE=1 doctor digits run.device=cuda | --runtime-class
plan LONG.yaml | File name too long
train digits run.dir=LONG/run | File name too long
plan digits data.source=folder data.root=LONG | File name too long
data check LONG | File name too long
data pack LONG out --level raw=64 | File name too long
evaluate LONG/run | File name too long
k8s render --out LONG | File name too long
evaluate photos | photos | 4
predict empty-run photos | holds no checkpoint | 4
export empty-run --to torch.export | empty-run | 4
"""
TABLE = [line.split(" | ") for line in WRONG.strip().splitlines()]


@pytest.fixture(scope="module")
def folder(made_place: Place, tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Path:
    """Return a folder with recipes, image folders of all kinds, tables, a pack and a run."""
    root = tmp_path_factory.mktemp("wrong")
    shutil.copytree(made_place.path / "images", root / "photos")
    shutil.copytree(made_place.path / "runs", root / "runs")
    (root / "data").mkdir()
    (root / "data/digits").symlink_to(digits)
    few = {str(digit): 1 for digit in range(9)}
    images = [image.relative_to(root / "photos") for image in root.glob("photos/*/*/*")]
    files = {f"{name}.yaml": text for name, text in RECIPES.items()}
    files |= {f"{name}/{file}": "x" for name, inside in FOLDERS.items() for file in inside}
    files |= {
        "notes.txt": "not an image", "few.json": json.dumps(few),
        "negative.json": json.dumps(few | {"9": -1}), "unknown.json": json.dumps(few | {"9": 1, "ten": 1}),
        "several.csv": "\n".join(["path,label", *(f"{image},class-0000;class-0001" for image in images)]),
    }  # fmt: skip
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    packed = ("data", "pack", str(root / "photos"), str(root / "packed"), "--level", "raw=64")
    assert main([*packed]) == 0
    return root


def paths(root: Path) -> set[str]:
    """Return all paths below `root`; the caches of data sets are left out."""
    found = {os.path.join(place, name) for place, folders, files in os.walk(root) for name in folders + files}
    return {path for path in found if ".pipeline-index" not in path}


@pytest.mark.parametrize("row", TABLE, ids=[row[0] for row in TABLE])
def test_a_wrong_request_is_one_line_and_changes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], row: list[str]
) -> None:
    request, named, *other = row
    code = int(other[0]) if other else 2
    words = shlex.split(request.replace("LONG", "x" * 300))
    monkeypatch.chdir(folder)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # keep the handlers of the test process
    monkeypatch.setattr("faulthandler.register", lambda *_: None)
    monkeypatch.setattr(start, "join", lambda *_: pytest.fail("the training starts"))
    while re.match(r"[A-Z_]+=", words[0]):
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    at = words.index("--nproc") if "--nproc" in words else len(words)
    alone = words[:at] + words[at + 2 :]  # in this process what several would train
    monkeypatch.setattr("pipeline.addons.deploy.processes.start_processes", lambda *_: main(alone))
    before, running = paths(folder), set(threading.enumerate())
    assert main(words) == code
    captured = capsys.readouterr()
    *findings, line = captured.err.splitlines()
    assert line.startswith("pipeline: ")
    assert named in line
    assert not captured.out
    # `doctor` refuses it, too, as the preflight of a node; it makes no folder
    if request.startswith("train digits") and not re.search("run.dir=(/proc|LONG)", request):
        monkeypatch.setenv("PET_NPROC_PER_NODE", "1")
        assert main(["doctor", *({"--nproc": "--world"}.get(word, word) for word in words[1:])]) == code
    assert not findings or words[0] == "doctor", "one line only"
    assert paths(folder) == before
    for thread in set(threading.enumerate()) - running:
        if thread.name in ("watchdog", "lock"):
            thread.join(5)
            assert not thread.is_alive(), f"{thread.name} continues after the request"
    for key in re.findall(r"mean ([a-z]+\.[a-z_.]+)\b(?!\.yaml)", line):
        assert key in all_keys()
    for command in re.findall(r"'pipeline ([^']+)'", line):
        if " " in command and not command.endswith("--help"):  # not only the name of a command
            parse(shlex.split(command))


def test_several_labels_are_refused_by_a_model_of_one(folder: Path) -> None:
    words = ("evaluate", "runs/done", "data.source=table", "data.table=several.csv", "data.root=photos")
    assert "the data has several labels a picture" in quick(*words, cwd=folder, code=2).error


def test_a_wrong_request_ends_before_torch_is_imported(tmp_path: Path, digits: Path) -> None:
    (tmp_path / "torch.py").write_text("import os\nos._exit(99)\n")
    train = ("train", "digits", f"data.root={digits}", f"run.dir={tmp_path / 'run'}", "track.uri=none")
    for words in (["train.epoch=3"], ["--nproc", "5"]):
        result = pipeline(*train, *words, cwd=tmp_path, PYTHONPATH=str(tmp_path))
        assert (result.code, result.out, result.err) == (2, "", f"pipeline: {result.error}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["torch.py"]
    assert pipeline(*train, PYTHONPATH=str(tmp_path)).code == 99, "the next step imports torch"


@pytest.mark.parametrize(
    ("number", "code"), [(errno.EIO, 75), (errno.ESTALE, 75), (errno.ENOENT, 4), (errno.ENOSPC, 4)]
)
def test_storage_out_of_reach_is_temporary_for_every_command(number: int, code: int) -> None:
    fail = f"raise OSError({number}, os.strerror({number}), 'journal.jsonl')"
    render = before_each("pipeline.addons.deploy.k8s.render", fail)
    assert "journal.jsonl" in quick("k8s", "render", prelude=render, code=code).error
    # in a rank, an unexpected error of a file stays a crash, which a launcher restarts
    train = before_each("pipeline.operate.launch.train", fail)
    assert "Traceback" in quick("train", "digits", prelude=train, code=1, RANK="0").err


@pytest.mark.fault("E5")
def test_a_small_dev_shm_is_enough_for_loader_workers(tmp_path: Path, digits: Path) -> None:
    mount = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
    small = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh"]
    if subprocess.run([*small, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system has no mount namespaces")
    train = [*small, sys.executable, "-m", "pipeline", "train", "digits", f"data.root={digits}", *SMALL]
    train += [f"run.dir={tmp_path / 'run'}", "data.workers=2", "train.max_steps=4"]
    run_together([train], [{}]).ended_with(0)


def test_the_rank_of_the_pod_whose_shell_is_used_changes_no_command(place: Place) -> None:
    for command in ("predict runs/done images", "sync runs/done", "doctor digits data.source=synthetic"):
        ends = []
        for ranks in ({}, {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}):
            result = quick(*command.split(), cwd=place.path, **ranks)
            ends.append((result.code, re.sub(r"\d+(\.\d+)?", "0", result.out + result.err)))
        assert ends[0] == ends[1]
        assert ends[0][1]


def test_a_rank_that_waits_for_the_others_says_so_and_how_to_do_without(place: Place) -> None:
    train = ("train", "digits", *IMAGES, "run.dir=runs/other")
    for command in (train, ("evaluate", "runs/done", "run.device=cpu")):
        ranks = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        result = quick(*command, "run.timeout=4", cwd=place.path, code=75, **ranks)
        assert "rank 1 of 2 waits for the other processes" in result.err


def test_torchrun_prints_a_wrong_request_once(tmp_path: Path, digits: Path, full: bool) -> None:
    # found by one process per machine, by all ranks at once, and by rank 0 alone (twice)
    wrong = {
        "train.epoch=3": "train.epochs",
        "model.batchnorm=sync": "synchronises batch norm on GPUs only",
        "batch.global=97": "does not divide by 2 processes",
        "model.init=none-such model.freeze=nose": "the model has no module 'nose'",
    }
    for words, says in [*wrong.items()][: None if full else 2]:
        request = ["digits", f"data.root={digits}", *words.split(), "track.uri=none"]
        # in an interpreter of its own: a fork has imported torch already
        result = Job(tmp_path / "run", request, nproc=2, by_torchrun=True, interpreter=True).run(code=1)
        lines = [line for line in result.err.splitlines() if line.startswith("pipeline: ")]
        assert sum(says in line for line in lines) == 1, result.err
        assert "forcefully" not in result.err, "torchrun kills no rank: all have exited"


def test_all_ranks_end_if_the_earlier_run_cannot_be_set_aside(job: MakeJob) -> None:
    fail = ("from pipeline.errors import StorageError", "raise StorageError('the disk is full', 'make room')")
    prelude = before_each("pipeline.operate.start.set_aside", *fail)
    result = job("train.max_steps=2", "run.resume=never", nproc=2, prelude=prelude).run_in_forks(code=4)
    assert result.err.count("the disk is full") == 1, "all ranks raise it, one prints it"
    assert "Traceback" not in result.err

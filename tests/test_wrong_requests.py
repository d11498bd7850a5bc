"""A table of wrong requests: each ends with one line and its exit code, before anything starts."""

import os
import re
import shlex
import shutil
import threading
from pathlib import Path

import pytest
from harness import DONE, Job, pipeline

from pipeline.cli.main import main, parse
from pipeline.config.help import all_keys
from pipeline.config.load import load
from pipeline.data.sources import make_synthetic, open_source
from pipeline.model.architectures import build
from pipeline.record.checkpoint import CheckpointWriter
from pipeline.record.journal import Journal
from pipeline.train import session

SMALL = "model.arch=shufflenet_v2_x0_5 augment.size=32 batch.global=8 data.workers=0 schedule.warmup=0"
PHOTOS = f"data.source=folder data.root=photos {SMALL}"

RECIPES = {
    "empty": "", "comment": "# nothing yet\n", "null": "---\n", "list": "- a\n- b\n", "text": "resnet50 please\n",
    "open": "model: [\n", "twice": "train: {epochs: 1}\ntrain: {epochs: 2}\n", "alias": "a: &x 1\nb: *x\n",
    "tab": "train:\n\tepochs: 3\n", "section": "data: {source: digits}\ntraning: {epochs: 3}\n",
    "key": "data: {source: digits}\ntrain: {epoch: 3}\n", "value": "data: {source: digits}\ntrain: {epochs: many}\n",
    "dotted": "data: {source: digits}\ntrain.epochs: 3\n", "scalar": "data: digits\n",
    "noroot": "model: {arch: vgg11}\n", "nowhere": "data: {root: nowhere}\n",
    "odd": "data: {source: digits}\nbatch: {global: 7}\n",
    "uri": "data: {source: digits}\ntrack: {uri: htp://foo}\n", "two": "data: {source: digits}\n---\nmodel: {}\n",
    "arch": "data: {source: digits}\nmodel: {arch: resnet19}\naugment: {size: 32}\nbatch: {global: 8}\n",
    "mix": "data: {root: /data}\naugment: {mixup: 0.2}\nbatch: {global: 6}\n", "number": "1: 2\n",
    "big": "# " + "x" * (1 << 16), "imagenet": "data: {root: /data}\nmodel: {arch: resnet19}\n",
}  # fmt: skip

FOLDERS = {
    "empty": [], "flat": ["train/1.jpg", "val/1.jpg"], "onlytrain": ["train/a/1.jpg", "train/b/1.jpg"],
    "onlyval": ["val/a/1.jpg", "val/b/1.jpg"],
    "differ": ["train/a/1.jpg", "train/b/1.jpg", "val/a/1.jpg", "val/c/1.jpg"],
    "one": ["train/a/1.jpg", "val/a/1.jpg"], "texts": ["train/a/1.txt", "train/b/1.txt", "val/a/1.txt", "val/b/1.txt"],
    "folder-image": ["train/a/1.jpg", "train/b/1.jpg", "train/b/000.jpg/x", "val/a/1.jpg", "val/b/1.jpg"],
    "valflat": ["train/a/1.jpg", "train/b/1.jpg", "val/1.jpg"], "single": ["a/1.jpg"], "few": ["a/1.jpg", "b/1.jpg"],
    "loose": ["1.jpg", "2.jpg"], "unfinished": [".packing.json"], "zip": ["images.zip"],
    "torn-pack": ["pack.json", "pack.index"], "empty-run": ["config.yaml"],
}  # fmt: skip

# request | a part of the line
SINGLE = """
train | required: RECIPE
train nosuch | recipe 'nosuch' is unknown
train digit | did you mean digits?
train nosuch.yaml | cannot be read: No such file or directory: give a YAML file, or one of cifar10
train ./photos | is a folder: give the name of a recipe or a YAML file, and images with data.root=photos
train train.epochs=3 | a recipe is missing before 'train.epochs=3'
train digits digits | 'digits' is not key=value
train digits train.epochs | write train.epochs=VALUE
train digits epochs | write train.epochs=VALUE
train digits foo | 'foo' is not key=value, such as train.epochs=10
train digits =3 | '=3' is not key=value
train digits --epochs | write train.epochs=VALUE
train digits --epochs=3 | write train.epochs=3
train digits --train.epochs=3 | write train.epochs=3
train digits --lr=0.1 | write optimizer.lr=0.1
train digits --batch-size=32 | write batch.global=32
train digits --learning_rate=1 | write optimizer.lr=1
train digits --model=resnet50 | write model.arch=resnet50
train digits --quite | did you mean --quiet?
train digits --gpus=2 | unknown flag --gpus
train digits --nproc=0 | '0' is not a whole number of at least 1
train digits --nproc=two | 'two' is not a whole number
train digits --numa-binding nod | did you mean node?
train digits --numa-binding node | --numa-binding node is for --nproc N: give it to torchrun, which has it too, or add
train digits --nproc 2 --numa-binding node run.device=cpu | binds to the CPUs next to a GPU, and there is none
train digits train.epoch=3 | did you mean train.epochs?
train digits epochs=3 | did you mean train.epochs?
train digits trian.epochs=3 | did you mean train.epochs?
train digits train.epochs=0 | train.epochs=0 is not allowed: give an integer from 1
train digits train.epochs=3.5 | train.epochs=3.5 is not allowed
train digits train.epochs=many | train.epochs=many is not allowed
train digits model=resnet18 | model is a section: give its keys model.arch
train digits run=runs/x | run is a section: give its keys run.dir
train digits parallel=dpp | give ddp | dataparallel | fsdp | stages
train digits batch.global=1e9 | batch.global=1e9 is not allowed
train digits batch.global=-8 | batch.global=-8 is not allowed
train digits batch.global=2000 | set batch.global to at most 1437
train digits batch.global=97 batch.accumulate=2 | that works is 96 or 98
train digits optimizer.lr=0 | optimizer.lr=0 is not allowed: give a number > 0
train digits optimizer.lr=nan | optimizer.lr=nan is not allowed
train digits optimizer.name=adam | give sgd | adamw
train digits optimizer.betas=0.9 | such as 'optimizer.betas=[0.9, 0.999]'
train digits augment.scale=0.5 | such as 'augment.scale=[0.08, 1.0]'
train digits augment.scale=[0.5] | such as 'augment.scale=[0.08, 1.0]'
train digits augment.ratio=1 | such as 'augment.ratio=[
train digits augment.growth=5 | such as 'augment.growth=[5 epochs, 10 epochs]'
train digits augment.size=4 | augment.size=4 is not allowed: give an integer from 8 to 2048
train digits augment.policy=rand | give none | randaugment
train digits profile.steps=5 | such as 'profile.steps=[20, 24]'
train digits profile.steps=9-5 | give the smaller number first
train digits schedule.name=cosin | give cosine | step | linear | constant
train digits schedule.warmup=5 | give a duration
train digits schedule.warmup=-1 | give a duration
train digits checkpoint.every=0 | give a duration above 0
train digits checkpoint.keep=0 | give an integer from 1
train digits evaluate.every=never | give a duration above 0
train digits data.source=imagenet | give folder | pack | digits | synthetic
train digits data.source=folder | data.source=folder needs data.root=FOLDER
train digits data.source=pack | data.source=pack needs data.root=FOLDER
train digits data.workers=-1 | give an integer from 0 to 1024
train digits data.val_split=2 | give a number > 0 and < 1
train digits train.precision=fp8 | give fp32 | tf32 | bf16 | fp16
train digits run.device=gpu | give auto | cpu | cuda
train digits run.device=cuda:1 | give auto | cpu | cuda
train digits run.seed=-1 | give an integer from 0
train digits run.exact=perhaps | give true | false
train digits run.resume=alwyas | auto | never | a checkpoint (alwyas does not exist
train digits run.resume=/nonexistent | run.resume=/nonexistent is not allowed
train digits run.resume=photos | photos holds no checkpoint
train digits run.dir=/proc/x | give a folder that can be written
train digits run.dir=s3://bucket/x | with checkpoint.mirror=s3://bucket/prefix
train digits run.dir=notes.txt | a file is in its way
train digits model.arch=resnet19 | did you mean resnet18?
train digits model.arch=ResNet50 | did you mean resnet50?
train digits model.arch=bert | : the models are alexnet,
train digits model.arch=maskrcnn_resnet50_fpn | but one for detection: the models are alexnet,
train digits model.arch=deeplabv3_resnet50 | but one for segmentation
train digits model.arch=r3d_18 | but one for video
train digits model.init=nosuch | neither a file or folder here
train digits model.init=DEFAULTS | did you mean DEFAULT?
train digits model.init=photos | photos holds no checkpoint
train digits model.init=models:/x | there is no runs/mlflow.db here
train digits model.freeze=backbone | set model.init to pretrained weights
train digits track.register=a/b | NAME or NAME@ALIAS
train digits track.uri=htp://foo | did you mean http?
train digits track.uri=http:// | give http://HOST:PORT
train digits track.uri=http:/host | give http://HOST:PORT
train digits track.uri=http://host:99999 | give http://HOST:PORT
train digits track.uri=https//host | give http://HOST:PORT
train digits track.uri=localhost:5000 | did you mean http://localhost:5000?
train digits track.uri=mlruns | in a database, not in a folder
train digits track.uri=file:///tmp/mlruns | in a database, not in a folder
train digits track.uri=ftp://host/runs | is not allowed: give http://HOST:PORT
train digits track.uri=sqlite://x.db | sqlite:///FILE
train digits track.uri=sqlite:x.db | sqlite:///FILE
train digits track.uri=sqlite:///photos | names a folder: give the database file in it
train digits track.uri=sqlite:///a?b/x.db | MLflow opens only files with a UTF-8 path without ? and %
train digits track.uri=postgres://host/db | did you mean postgresql?
train digits track.required=true track.uri=none | track.required=true needs a tracking server
plan | required: RECIPE
plan digits --world=0 | '0' is not a whole number
plan digits --world=7 | the nearest batch.global that works is 91 or 98
plan digits --nodes=2 | --world 1 does not divide by --nodes 2
plan digits --wrld=2 | did you mean --world?
plan digits model.arch=resnet19 | did you mean resnet18?
plan digits track.uri=htp://foo | did you mean http?
plan resnet50-90 | 'pipeline data import imagenet ARCHIVES data/imagenet'
doctor nosuch | recipe 'nosuch' is unknown
doctor digits track.uri=htp://foo | did you mean http?
doctor digits --world=two | 'two' is not a whole number
evaluate | required: RUN_DIR|CHECKPOINT
evaluate nosuch | nosuch does not exist: give a run's folder or a file step-
evaluate notes.txt | notes.txt is not a checkpoint: give a run's folder or a file step-
evaluate models:/digits@best | only 'pipeline predict' takes
evaluate done | did you mean runs/done?
predict | required:
predict runs/done | required: IMAGE
predict nosuch photos | nosuch does not exist
predict runs/done nosuch.jpg | nosuch.jpg: file not found: give image files
predict runs/done empty | no image in empty
predict models:/x@ photos | 'models:/x@' is not the URI of a model: give models:/NAME@ALIAS
predict runs/done photos --sheet=out.jpg | give the name of a .png file
predict runs/done photos --sheet=photos | --sheet photos is a folder
predict models:/x photos | there is no runs/mlflow.db here
export nosuch --to=onnx | nosuch does not exist
export runs/done --to=onnx --out=nosuch/model.onnx | nosuch is not a folder
export runs/done | required: --to
export runs/done --to=tflite | --to 'tflite' is not allowed: give torch.export | onnx
verify nosuch | nosuch does not exist: give a run's folder
verify photos | has no readable receipt
report nosuch | nosuch does not exist: give a run's folder
report photos | is not the folder of a run that has started
sync nosuch | nosuch does not exist: give a run's folder
sync photos | is not the folder of a run that has started
data mak digits | unknown action 'mak'; did you mean make?
data make | required: kind
data make cats | kind 'cats' is not allowed: give digits | synthetic
data make digits photos | photos already exists
data make digits out --images=3 | leave them out with 'digits'
data make synthetic out --classes=1 | at least two classes
data get imagenet | did you mean imagenette?
data get imagenette photos | photos already exists
data import imagenet | required: ARCHIVES, OUT
data import imagenet nosuch out | nosuch is not a folder
data pack photos | required: OUT
data pack nosuch out | nosuch is not a folder
data pack photos out --level=best | level best is not allowed
data pack photos out --val-split=1 | '1' is not a number from 0 to 1, without 1, such as 0.1
data pack packed out | packed is a pack already
data check nosuch | nosuch is not a folder
data check photos --val-split=2 | '2' is not a number from 0 to 1
data check photos --val-split=nan | 'nan' is not a number from 0 to 1
bench bogus | unknown subject 'bogus'; the choices are train, track,
bench gpus | unknown subject 'gpus'; did you mean gpu?
bench data --images=nosuch | --images nosuch is not a folder
bench store s3://bucket --images=nosuch | --images nosuch is not a folder
bench store bucket --images=photos | bucket is not allowed: give s3://bucket/prefix
bench train nosuch | 'nosuch' is not key=value
bench train --only plian | did you mean plain?
bench gpu --only chekcs | did you mean checks?
bench top1 nosuch | recipe 'nosuch' is unknown
rehearse digits | required: --nodes
rehearse digits --nodes=5 | the nearest batch.global that works is 95 or 100
rehearse digits --nodes=5 --gpus=2 | does not divide by 10 processes
rehearse digits --nodes=2 --gpus=2 --nproc=2 | --nproc 2 is for nodes without GPUs
k8s rendr | unknown action 'rendr'; did you mean render?
k8s render --nodes=7 | the nearest batch.global that works is 91 or 98
k8s render --namespace=UPPER_case | 'UPPER_case' is not a Kubernetes name (RFC 1123)
k8s render --namespace=a.b | 'a.b' is not a Kubernetes name
k8s render --pull-secret=my_secret | 'my_secret' is not a Kubernetes name
k8s render --storage-class=Fast | 'Fast' is not a Kubernetes name
k8s render --image=registry/Name | 'registry/Name' is not an image
k8s render --image=name@sha256:0123 | is not an image: give [REGISTRY/]NAME[:TAG]
k8s render --mlflow-image=https://host/name | is not an image
k8s render --memory=4G | '4G' is not an amount of memory
k8s render --shm=100Gi | --shm 100Gi is more than half of --memory 24Gi
k8s render --nproc=4 | --nproc 4 is for pods without GPUs
k8s render --out=/proc/x | give --out a folder that can
k8s render --store=gs://bucket/x | 'gs://bucket/x' is not a place in an object store, such as s3://my-bucket/imagenet
k8s render --store=s3://bucket/a/../b | is not a place in an object store
k8s render --store-endpoint=s3.example.org | is not the URL of a store, such as https://s3.example.org:9000
k8s render --store-endpoint=http://me:pass@host.example | a user and a password do not belong in it
k8s render --store-cidr=10.0.0.1/24 | '10.0.0.1/24' is not a network, such as 10.0.0.0/24
k8s render --store-cidr=10.0.0.0/24 | --store-cidr 10.0.0.0/24 is for pods that may reach a bucket: add --store s3://
k8s render --service-account=Me | 'Me' is not a Kubernetes name
"""

# requests of several words, or of a whole folder or recipe
SEVERAL = """
train digits train.epochs 3 | write train.epochs=3
train digits train.epochs = 3 | write train.epochs=3
train digits train.epochs =3 | write train.epochs=3
train digits train.epochs= 3 | write train.epochs=3
train digits train.epochs: 3 | write train.epochs=3
train digits lr 0.1 epochs 3 | write optimizer.lr=0.1
train digits --epochs 3 | write train.epochs=3
train digits --lr 0.1 --epochs 3 | write optimizer.lr=0.1
train digits --batch-size 32 --nproc 2 | write batch.global=32
train digits train.epochs=1 --nporc 2 | did you mean --nproc?
train digits augment.scale=[0.4, 1.0] | quote a value that has a space, as in 'augment.scale=[0.4, 1.0]'
train digits schedule.warmup=2 epochs | as in 'schedule.warmup=2 epochs'
train digits batch.global=9 --nproc 2 | the nearest batch.global that works is 8 or 10
train digits model.batchnorm=sync --nproc 2 | synchronises batch norm on GPUs only
train digits augment.scale=[0.9,0.1] augment.size=32 | give the smaller number first
train digits augment.first_size=64 augment.size=32 | the side can only grow
train digits augment.first_size=16 augment.growth=[1_epoch,99_epochs] | before the training ends
train digits run.exact=true exact.shards=5 | exact.shards that work are 1, 2, 3, 4, 6, 8
train digits run.exact=true train.precision=fp16 | use bf16 or fp32
train digits run.exact=true parallel=fsdp | leave one of them out
train digits run.deterministic=true model.batchnorm=average | use local
train digits parallel=stages stages.count=3 | worlds that work are 3
train digits parallel=stages model.freeze=backbone | leave the option out
train digits parallel=fsdp train.precision=fp16 | use bf16 or fp32
train digits parallel=dataparallel --nproc 2 | uses one process for all GPUs
train digits optimizer.momentum=0 optimizer.nesterov=true | needs optimizer.momentum > 0
train digits schedule.warmup=9_epochs train.epochs=3 | make it shorter
train digits schedule.warmup=2_epochs schedule.cooldown=2_epochs train.epochs=3 | make it shorter
train digits augment.mixup=0.2 batch.global=5 | an even number
train digits data.source=synthetic data.num_classes=1 | give an integer from 2
train digits data.source=synthetic data.num_images=8 data.num_classes=8 batch.global=16 | set batch.global to at most 8
train digits model.arch=resnet19 model.init=DEFAULT | did you mean resnet18?
train digits model.init=DEFAULT model.arch=vit_s_16 augment.size=224 | neither a file or folder here
train digits model.arch=resnet19 --nproc 2 run.resume=never | did you mean resnet18?
train digits model.arch=alexnet augment.size=32 | raise augment.size
train digits track.uri=htp://foo run.resume=never | did you mean http?
train digits run.dir=runs/done train.epochs=1 | was started with another configuration
train digits run.dir=runs/done optimizer.lr=0.3 | restore these keys, give another run.dir
train digits run.dir=runs/done data.balance=sqrt | data.balance: none -> sqrt
train digits run.dir=data/digits data.root=data/digits | the folder of the images
train resnet50-90 data.workers=0 | 'pipeline data import imagenet ARCHIVES data/imagenet'
train resnet50-v2 --nproc 2 | 'pipeline data import imagenet ARCHIVES data/imagenet'
train resnet50-fast data.workers=0 | ARCHIVES data/imagenet-500 --pack max-side=500,q=90'
train imagenette data.workers=0 | 'pipeline data get imagenette data/imagenette'
train digits data.source=folder data.root=nowhere | 'pipeline data make synthetic nowhere'
train digits data.source=folder data.root=s3://bucket/data | needs data.source=pack: pack a folder into the bucket
train digits data.source=folder data.root=gs://bucket/data | copy the data to this machine and give its folder
train digits data.source=pack data.root=gs://bucket/data | copy the data to this machine and give its folder
train digits data.source=pack data.root=s3://B/data | s3://B/data is not allowed: give s3://bucket/prefix
train digits data.source=folder data.root=notes.txt | notes.txt is not a folder
train digits data.source=folder data.root=photos/train/class-0000 | holds no folders
train digits data.source=folder data.root=packed | is a pack: set data.source=pack
train digits data.source=pack data.root=photos | 'pipeline data pack photos photos-pack' and give data.root=photos-pack
train digits data.source=pack data.root=empty | 'pipeline data pack SRC empty'
train digits data.source=pack data.root=nowhere | 'pipeline data pack SRC nowhere'
train digits data.source=pack data.root=unfinished | 'pipeline data pack SRC unfinished'
train digits data.source=pack data.root=notes.txt | give the folder of a pack
train digits data.source=pack data.root=torn-pack | the pack torn-pack is damaged
train digits data.source=folder data.root=empty | holds no folders
train digits data.source=folder data.root=flat | is flat: it holds images (1) but no class folders
train digits data.source=folder data.root=onlytrain | has train/ but no val/
train digits data.source=folder data.root=onlyval | has val/ but no train/
train digits data.source=folder data.root=differ | the classes of train/ and val/ differ
train digits data.source=folder data.root=one | at least two are needed
train digits data.source=folder data.root=texts | holds no image
train digits data.source=folder data.root=folder-image | 000.jpg is a folder that is named like an image
train digits data.source=folder data.root=valflat | val/ is flat
train digits data.source=folder data.root=single | at least two are needed
train digits data.source=folder data.root=few | data.val_split=0.1 of each class is none; add images
train digits data.source=folder data.root=loose | holds no folders
train digits data.source=folder data.root=zip | holds no folders
data check folder-image | 000.jpg is a folder that is named like an image
data check differ --json | the classes of train/ and val/ differ
data check packed --write-sums | leave --write-sums out
data check torn-pack | the pack torn-pack is damaged
data pack folder-image out | 000.jpg is a folder that is named like an image
data pack photos photos | photos is inside the image folder photos: name a folder outside it
data pack photos photos/packed | is inside the image folder photos
data pack photos packed --level raw=32 | holds a pack of another source or level
data make synthetic out --images 8 --classes 4 | make at least 13 images
data make digits s3://bucket/digits | is not a folder: make it here; 'pipeline data pack FOLDER s3://bucket/prefix'
data get imagenette s3://bucket/data | is not a folder
data pack photos gs://bucket/data | gs://bucket/data is not allowed: give a folder, or s3://bucket/prefix
data pack photos s3://Bucket | s3://Bucket is not allowed: give s3://bucket/prefix
data pack s3://bucket/photos out | is not a folder
data check s3:// | s3:// is not allowed: give s3://bucket/prefix
data import imagenet photos s3://bucket/data | can hold a pack only: give its level, such as --pack
data import imagenet photos out --pack zip | level zip is not allowed
data import imagenet photos out | holds no ILSVRC2012_img_train.tar
train empty.yaml | is empty: it needs at least the images to train on
train empty.yaml train.epochs=3 | is empty
train comment.yaml | is empty
train null.yaml | is empty
train list.yaml | has no sections
train text.yaml | has no sections
train open.yaml | is not valid YAML
train twice.yaml | key 'train' is given twice
train alias.yaml | an alias (*name) is not allowed
train tab.yaml | is not valid YAML
train section.yaml | did you mean train.epochs?
train key.yaml | did you mean train.epochs?
train value.yaml | train.epochs=many is not allowed
train dotted.yaml | write 'train: {epochs: 3}'
train scalar.yaml | data is a section: give its keys
train noroot.yaml | data.root is missing
train nowhere.yaml | data.root=nowhere is not a folder
train odd.yaml --nproc 2 | the nearest batch.global that works is 6 or 8
train uri.yaml | did you mean http?
train two.yaml | is not valid YAML
train arch.yaml | did you mean resnet18?
train number.yaml | there is no key '1'
train big.yaml | is larger than 64 KiB
train photo.jpg.yaml | is not UTF-8 text
plan digits --world 5 --nodes 2 | does not divide by --nodes 2
plan digits --world 4 --nodes 2 batch.global=6 | the nearest batch.global that works is 4 or 8
plan empty.yaml --world 2 | is empty
doctor arch.yaml --world 2 | did you mean resnet18?
doctor digits data.source=folder data.root=differ | the classes of train/ and val/ differ
doctor digits model.arch=resnet19 run.resume=/nonexistent | run.resume=/nonexistent is not allowed
evaluate nosuch --nproc 2 | nosuch does not exist
evaluate runs/done model.arch=resnet18 | leave model.* out
evaluate runs/done data.source=folder data.root=nowhere | nowhere
predict runs/done photos nosuch.jpg | nosuch.jpg: file not found
predict runs/done photos --sheet nowhere/sheet.png | nowhere is not a folder
export runs/done --to safetensors --out photos | photos is a folder: give a file in it
verify nosuch --steps 3 | nosuch does not exist
verify photos --steps 0 | '0' is not a whole number
verify photos --steps 9-4 | '9-4' is not A-B with A less than B
verify photos --steps 4 --against photos | --against: not allowed with argument --steps
verify photos --page photo.jpg | --page needs --against
verify runs/done --against nosuch | nosuch does not exist
bench top1 digits --seeds 0 | '0' is not a whole number
rehearse digits --nodes 2 --kill 9@3 | with --nodes 2 the nodes are 0 to 1
rehearse digits --nodes 2 --data nosuch | --data nosuch is not a folder
rehearse digits --nodes 2 --image UPPER | 'UPPER' is not an image
rehearse digits --nodes 2 run.resume=never | must resume the run itself
k8s render --cpu --gpus 2 | not allowed with argument --cpu
k8s render --memory 4Gi --shm 8Gi | --shm 8Gi is more than half of --memory 4Gi
k8s render --cpu --memory 1Gi | --shm 1Gi is more than half of --memory 1Gi
k8s render digits model.arch=resnet19 | did you mean resnet18?
k8s render digits run.device=cuda --cpu | leave one of the two out
k8s render digits run.device=cpu --gpus 1 | add --cpu, or leave run.device out
k8s render digits --numa-binding node --cpu | --numa-binding node binds to the CPUs next to a GPU: leave --cpu out
k8s render digits model.batchnorm=sync --cpu | synchronises batch norm on GPUs only
k8s render --gang native --queue team | --gang native and --queue team both start all pods together: give one
k8s render --nodes 9:11 | the nearest batch.global that works is
k8s render --nodes 3:2 | '3:2' is not MIN:MAX with MIN at most MAX
k8s render --nodes 2 --gang-check | no flag --gang-check since version 0.3: measure the links with nccl-tests
k8s render --gang volcano | 'volcano'
doctor digits --gang | no flag --gang since version 0.3: measure the links with nccl-tests
k8s render --rdma rdma/hca --cpu | --rdma rdma/hca is for NCCL, which needs GPUs: leave --cpu out
k8s render --rdma mlx5 | 'mlx5' is not a device's resource
k8s render --topology zone= | 'zone=' is not a node label
k8s render --runtime-class NVIDIA | 'NVIDIA' is not a Kubernetes name
k8s render --priority-class high_prio | 'high_prio' is not a Kubernetes name
k8s render --queue Team | 'Team' is not a Kubernetes name
k8s render --sync /runs/digits | '/runs/digits' is not a run's name: give that of its folder in /runs
k8s render --example mlflow | did you mean mlflow-shared?
k8s render --example mlflow-shared --mlflow-auth | starts a server without a password: leave --mlflow-auth out
k8s render digits checkpoint.mirror=s3://bucket/run | is for pods that may reach a bucket: add --store s3://BUCKET/PREFIX
k8s render resnet50-90 data.source=pack data.root=s3://bucket/pack --nodes 1 --gpus 8 | add --store s3://BUCKET/PREFIX
k8s render resnet50-90 --store s3://bucket --nodes 1 --gpus 8 | run 'pipeline data pack data/imagenet s3://bucket/data'
k8s render digits checkpoint.mirror=none --store s3://bucket | would lose the run with the disk of its pod: leave it out
k8s render --store s3://bucket --store-endpoint http://minio:9000 | give http://minio.NAMESPACE.svc:9000
k8s render --store s3://bucket/x/ --sync digits | copy s3://bucket/x/runs/digits to a folder
k8s render --store s3://bucket --example stage-imagenet | mounts the claim data, and --store has none: leave one
k8s render --example trainjob --sync digits | not allowed with argument
k8s render digits run.dir=/runs/x --nodes 4 | has no effect in a pod
k8s render digits track.uri=htp://foo --nodes 4 | did you mean http?
k8s render digits model.init=DEFAULT model.freeze=nose | the model has no module 'nose'
k8s render digits parallel=stages stages.count=3 | stages.count=3 does not divide 2 processes
k8s render digits augment.size=2000 evaluate.batch=4096 | enlarge it
k8s render resnet50-90 --nodes 3 --gpus 8 | the nearest batch.global that works is 2040 or 2064
k8s render resnet50-90 model.arch=resnet51 --gpus 8 | did you mean resnet50?
k8s render imagenet.yaml --nodes 4 | did you mean resnet18?
k8s render mix.yaml --nodes 2 | an even number
k8s render odd.yaml --nodes 2 | the nearest batch.global that works is 6 or 8
k8s render empty.yaml --nodes 2 | is empty
MLFLOW_TRACKING_URI=htp://foo train digits | MLFLOW_TRACKING_URI=htp://foo is not allowed
MLFLOW_TRACKING_URI=mlruns doctor digits | MLFLOW_TRACKING_URI=mlruns is not allowed
MLFLOW_TRACKING_URI=localhost:5000 predict models:/x photos | did you mean http://localhost:5000?
MLFLOW_TRACKING_URI=htp://foo sync runs/done | MLFLOW_TRACKING_URI=htp://foo is not allowed
RANK=1 WORLD_SIZE=x train digits | WORLD_SIZE='x' in the environment is not an integer
RANK=0 WORLD_SIZE=2 train digits | no address of rank 0
RANK= WORLD_SIZE= train digits | RANK='' in the environment is not an integer: unset RANK and WORLD_SIZE to train
RANK=1 train digits | WORLD_SIZE is not set: unset RANK and WORLD_SIZE to train or evaluate alone
WORLD_SIZE=2 LOCAL_RANK= evaluate runs/done | RANK is not set: unset RANK and WORLD_SIZE to train or evaluate alone
RANK=1 WORLD_SIZE=2 predict runs/done nosuch.jpg | nosuch.jpg: file not found
RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 verify runs/none | runs/none
RANK= WORLD_SIZE= LOCAL_RANK= k8s render digits --nodes 7 | 91 or 98
PET_NNODES=0 doctor digits | PET_NNODES='0' in the environment
"""

# 4: the folder exists and what it must hold is missing
MISSING = """
evaluate photos | holds no checkpoint
predict photos photo.jpg | holds no checkpoint
export empty-run --to torch.export | holds no checkpoint
"""


def table(text: str) -> list[tuple[str, str]]:
    rows = [line.partition(" | ") for line in text.strip().splitlines()]
    return [(request, says) for request, _, says in rows]


TABLE = [(request, 2, says) for request, says in table(SINGLE) + table(SEVERAL)]
TABLE += [(request, 4, says) for request, says in table(MISSING)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Path:
    """Return a folder with recipes, image folders of all kinds, a pack and a run."""
    root = tmp_path_factory.mktemp("wrong")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for name, text in RECIPES.items():
            Path(f"{name}.yaml").write_text(text)
        Path("photo.jpg.yaml").write_bytes(b"\xff\xd8\xff\xe0")
        Path("notes.txt").write_text("not an image")
        Path("photo.jpg").write_bytes(b"\xff\xd8\xff\xe0")
        for name, files in FOLDERS.items():
            Path(name).mkdir()
            for file in files:
                Path(name, file).parent.mkdir(parents=True, exist_ok=True)
                Path(name, file).write_bytes(b"x")
        Path("data").mkdir()
        Path("data/digits").symlink_to(digits)
        make_synthetic(Path("photos"), 16, 4, 32)
        assert main(["data", "pack", "photos", "packed"]) == 0
        save_run(Path("runs/done"))
    return root


def save_run(run: Path) -> None:
    (run / "checkpoints").mkdir(parents=True)
    config = load("digits", [*PHOTOS.split(), f"run.dir={run}", "run.device=cpu"])
    source = open_source(config)
    (run / "config.yaml").write_text(config.to_yaml())
    Journal(run / "journal.jsonl", pytest.fail)
    contents = {
        "model": build(config.model, 4).state_dict(), "average": None, "config": config.to_yaml(), "epoch": 1,
        "step": 2, "classes": list(source.classes), "data": source.digest, "world": 1,
    }  # fmt: skip
    writer = CheckpointWriter(run / "checkpoints", 1, pytest.fail)
    writer.save(contents, 2, None)
    writer.wait()


def paths(root: Path) -> set[str]:
    """Return all paths below `root`; the caches of data sets are left out."""
    found = {os.path.join(place, name) for place, folders, files in os.walk(root) for name in folders + files}
    return {path for path in found if ".pipeline-index" not in path}


@pytest.mark.parametrize(("request_", "code", "says"), TABLE, ids=[request for request, _, _ in TABLE])
def test_a_wrong_request_is_one_line_and_changes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    request_: str, code: int, says: str,
) -> None:  # fmt: skip
    words = shlex.split(request_)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # keep the handlers of the test process
    monkeypatch.setattr("faulthandler.register", lambda *_: None)
    monkeypatch.setattr(session, "_join", lambda *_: pytest.fail("the training starts"))
    monkeypatch.setattr("pipeline.operate.launch.start_processes", lambda *_: in_this_process(words))
    while re.match(r"[A-Z_]+=", words[0]):
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    words = [re.sub(r"_(epochs?)", r" \1", word) for word in words]
    before, running = paths(folder), set(threading.enumerate())
    assert main(words) == code
    captured = capsys.readouterr()
    *findings, line = captured.err.splitlines()
    assert line.startswith("pipeline: ")
    assert says in line
    assert not captured.out
    assert not [row for row in findings if not row.startswith(("ok ", "BAD ", " "))]
    assert not findings or words[0] == "doctor", "one line only"
    assert paths(folder) == before
    for thread in set(threading.enumerate()) - running:
        if thread.name in ("watchdog", "lock"):
            thread.join(5)
            assert not thread.is_alive(), f"{thread.name} continues after the request"
    follow_advice(line)


def in_this_process(words: list[str]) -> int:
    """Train in this process what --nproc would train in several."""
    at = words.index("--nproc")
    return main([*words[:at], *words[at + 2 :]])


def follow_advice(line: str) -> None:
    """Assert that the commands and keys that a message names exist."""
    for key in re.findall(r"(?:write|mean) ([a-z]+\.[a-z_.]+)\b(?!\.yaml)", line):
        assert key in all_keys(), line
    for command in re.findall(r"'pipeline ([^']+)'", line):
        if " " in command and not command.endswith("--help"):  # not only the name of a command
            parse(shlex.split(command))


def test_the_table_is_long_enough() -> None:
    assert len({request for request, _, _ in TABLE}) >= 200
    assert len(dict(table(SEVERAL))) >= 60


@pytest.mark.parametrize(
    ("request_", "says"),
    [("train digits model.arch=resnet19", "did you mean resnet18?"),
     ("predict runs/done nosuch.jpg", "nosuch.jpg: file not found: give image files, or folders with images"),
     pytest.param("train digits --nproc 2 run.resume=/nonexistent", "/nonexistent", marks=pytest.mark.full),
     pytest.param("train digits --epochs 3", "write train.epochs=3", marks=pytest.mark.full),
     pytest.param("k8s render digits --nodes 7", "91 or 98", marks=pytest.mark.full)],
)  # fmt: skip
def test_a_wrong_request_to_a_real_process_is_one_line(folder: Path, request_: str, says: str) -> None:
    before = paths(folder)
    result = pipeline(*request_.split(), cwd=folder)
    assert (result.code, result.out) == (2, "")
    assert says in result.error
    assert len(result.err.splitlines()) == 1
    assert paths(folder) - before <= {f"{folder}/runs/digits"}


@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_good_request_shows_its_plan_once_and_first(folder: Path, tmp_path: Path, nproc: int) -> None:
    shutil.copytree(folder / "photos", tmp_path / "photos")
    words = ["digits", *SMALL.split(), "data.source=folder", f"data.root={tmp_path}/photos", "train.max_steps=1"]
    job = Job(tmp_path / "run", [*words, "run.device=cpu", "track.uri=none", "run.resume=never"], nproc=nproc)
    result = job.run()
    assert result.code == 0, result.err
    assert DONE.match(result.out)
    assert result.err.count("  learning rate ") == 1
    assert result.err.index("a fresh start") < result.err.index("  learning rate ") < result.err.index("creating ")

"""The command line: parse, call, exit code.

What a command answers goes to standard output; what it says meanwhile, and the one line of an error, to standard error.
"""

import argparse
import contextlib
import faulthandler
import os
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import NoReturn

from pipeline import verdict, world
from pipeline.train.signals import StopRequest
from pipeline.verdict import RequestError, StorageError, Verdict

_DESCRIPTION = """\
Train image classifiers with PyTorch DDP: kill it anywhere, restart it, resize it; the same samples, the same bits, one
run in MLflow.

  pipeline train digits                      the embedded example, in a minute
  pipeline train digits --nproc 2            two processes on this machine
  torchrun --nproc-per-node 8 -m pipeline train my.yaml data.root=/data batch.global=1024
"""

_EPILOG = """\
exit codes: 0 done · 2 the request is wrong, do not retry · 3 the loss is not finite · 4 data or storage ·
75 temporary (interrupted, folder held by another, a peer not there yet): retry · anything else a crash
"""

_OVERRIDES = "key=value changes the recipe; the keys are listed by 'pipeline train --help'"


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line and RequestErrors."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise RequestError(f"{message} (see '{self.prog} --help')")


class _HelpWithKeys(argparse.Action):
    """`--help` of train: the parser's own text, then every key; reading the schema takes a moment, so only here."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from pipeline.config import describe_keys

        print(f"{parser.format_help()}\nkeys:\n{describe_keys()}")
        parser.exit()


def command() -> NoReturn:
    """`main`, as a process.

    One of several leaves without the interpreter's farewell: gloo's threads outlive `destroy_process_group`, and one that
    lets go of a tensor in its midst ends in SIGABRT, a run that is done too (pytorch/pytorch#179291).
    """
    code = main()
    if "RANK" in os.environ:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    is_main = os.environ.get("RANK", "0") == "0"  # of several processes one speaks
    is_first_here = os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        options = _parse(arguments)
        answer = options.run(options)
        if isinstance(answer, int):
            return answer
        if is_main:
            print(answer, flush=True)
        return verdict.OK
    except Verdict as ending:
        # what is found before torch is imported, every process of a machine finds; later it may be one process's own
        is_own = not ending.is_common and (is_first_here or "torch" in sys.modules)
        if is_main or (ending.code == RequestError.code and is_own):
            print(f"pipeline: {ending}", file=sys.stderr, flush=True)
        if ending.code in verdict.FINAL:
            world.stop_restarts()
        return ending.code
    except KeyboardInterrupt:
        return verdict.TemporaryError.code
    except BrokenPipeError:  # whoever read our answer has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return verdict.OK
    except OSError as error:
        if error.filename is None or world.launched():  # a rank's is a crash, which its launcher may start anew
            raise
        print(f"pipeline: {StorageError(f'{error.filename}: {error.strerror}')}", file=sys.stderr, flush=True)
        return StorageError.code


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options of a command; key=value words may stand before and after its flags, which argparse alone cannot."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and hasattr(options, "overrides") and not any(word.startswith("-") for word in rest):
        options.overrides = options.overrides + rest
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="pipeline", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_run_commands(commands)
    _add_data_commands(commands)
    _add_machine_commands(commands)
    _add_bench_commands(commands)
    return parser


def _add_run_commands(commands: "argparse._SubParsersAction[_Parser]") -> None:
    train = commands.add_parser(
        "train", help="train a recipe; the same command again goes on where it stood", add_help=False,
        description="Trains RECIPE, a name from pipeline/recipes/ or the path of a YAML file. Under torchrun it takes its"
        " place in the group; alone it is one process, or starts N on this machine.",
    )  # fmt: skip
    train.add_argument("-h", "--help", nargs=0, action=_HelpWithKeys, help="this text and every key")
    train.add_argument("recipe", type=_place, metavar="RECIPE")
    train.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="changes the recipe, for example train.epochs=10"
    )
    train.add_argument("--nproc", type=_count, metavar="N", help="start N processes on this machine")
    train.add_argument("--quiet", action="store_true", help="errors and the last line alone")
    train.set_defaults(run=_train)

    evaluate = commands.add_parser("evaluate", help="validate a checkpoint exactly, at any number of processes")
    evaluate.add_argument(
        "target", type=_place, metavar="RUN_DIR|CHECKPOINT", help="a run's folder (its last checkpoint) or a file"
    )
    evaluate.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=_OVERRIDES)
    evaluate.add_argument("--nproc", type=_count, metavar="N", help="start N processes on this machine")
    evaluate.set_defaults(run=_evaluate)

    predict = commands.add_parser(
        "predict", help="label images: the five likeliest classes, with their probabilities",
        description="Labels each IMAGE, and each image in a folder, with the model of a checkpoint, of a run's last one, or"
        " of MLflow's registry (at MLFLOW_TRACKING_URI, else in runs/mlflow.db). Bad images are named and left out.",
    )  # fmt: skip
    predict.add_argument("target", type=_place, metavar="CHECKPOINT|RUN_DIR|models:/NAME@ALIAS", help="whose model")
    predict.add_argument("images", nargs="+", type=_place, metavar="IMAGE", help="image files, and folders of them")
    predict.add_argument("--json", action="store_true", help="for machines")
    predict.add_argument("--sheet", type=_path, metavar="FILE.png", help="also draw the first 64 with their labels")
    predict.set_defaults(run=_predict)

    plan = commands.add_parser("plan", help="the arithmetic of a run, without running it")
    plan.add_argument("recipe", type=_place, metavar="RECIPE")
    plan.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=_OVERRIDES)
    plan.add_argument("--world", type=_count, default=1, metavar="N", help="processes in the whole job (default 1)")
    plan.add_argument(
        "--nodes", type=_count, default=1, metavar="M", help="machines that they are spread over (default 1)"
    )
    plan.set_defaults(run=_plan)

    verify = commands.add_parser(
        "verify", help="repeat a run from its receipt: identical, or the first step and tensor that differ",
        description="Trains the run in RUN_DIR again from its receipt, in a temporary folder, and compares weights and"
        " checkpoints. Answers 'identical: …' (exit 0) or 'differs: …' (exit 1).",
    )  # fmt: skip
    verify.add_argument("run_dir", type=_path, metavar="RUN_DIR")
    verify.add_argument("--steps", type=_count, metavar="N", help="the first N steps alone (default: all)")
    verify.set_defaults(run=_verify)

    report = commands.add_parser("report", help="draw a run's curves, confusions and mistakes into its folder report/")
    report.add_argument("run_dir", type=_path, metavar="RUN_DIR")
    report.set_defaults(run=_report)

    export = commands.add_parser(
        "export", help="the trained model in another format, compared with it on validation images",
        description="Writes the model of a run's last checkpoint, or of the one that is named, to the run's folder export."
        " torch.export and onnx take pixels of 0 to 255 and give probabilities; safetensors has the weights alone.",
    )  # fmt: skip
    export.add_argument("target", type=_path, metavar="RUN_DIR|CHECKPOINT")
    export.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=_OVERRIDES)
    export.add_argument("--to", required=True, choices=("torch.export", "onnx", "safetensors"))
    export.add_argument("--out", type=_path, metavar="FILE", help="another place for it")
    export.set_defaults(run=_export)

    sync = commands.add_parser("sync", help="send to MLflow what the journal holds and the server lacks")
    sync.add_argument("run_dir", type=_path, metavar="RUN_DIR")
    sync.add_argument(
        "--follow", action="store_true", help="go on until standard input ends, as a training run uses it"
    )
    sync.set_defaults(run=_sync)


def _add_data_commands(commands: "argparse._SubParsersAction[_Parser]") -> None:
    data = commands.add_parser("data", help="make or check a data set").add_subparsers(metavar="ACTION", required=True)
    make = data.add_parser("make", help="write the embedded digits, or synthetic images, as an image folder")
    make.add_argument("kind", choices=("digits", "synthetic"))
    make.add_argument("out", nargs="?", type=_place, metavar="OUT", help="folder to make (default data/<kind>)")
    make.add_argument(
        "--images", type=_count, default=1000, metavar="N", help="synthetic: images to train (default 1000)"
    )
    make.add_argument("--classes", type=_count, default=10, metavar="N", help="synthetic: classes (default 10)")
    make.add_argument("--side", type=_count, default=64, metavar="PX", help="synthetic: pixels a side (default 64)")
    make.set_defaults(run=_data_make)
    get = data.add_parser("get", help="fetch a published data set, as an image folder")
    get.add_argument("kind", choices=("imagenette",))
    get.add_argument("out", nargs="?", type=_place, metavar="OUT", help="folder to make (default data/<kind>)")
    get.set_defaults(run=_data_get)
    imported = data.add_parser(
        "import", help="ImageNet's published archives as an image folder or a pack",
        description="ARCHIVES holds ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and ILSVRC2012_devkit_t12.tar.gz. Each"
        " image is read once, where it lies. Given again it goes on.",
    )  # fmt: skip
    imported.add_argument("kind", choices=("imagenet",))
    imported.add_argument("archives", type=_path, metavar="ARCHIVES")
    imported.add_argument("out", type=_path, metavar="OUT")
    imported.add_argument("--pack", metavar="LEVEL", help="a pack of this level, as of 'pipeline data pack'")
    imported.set_defaults(run=_data_import)
    pack = data.add_parser(
        "pack", help="an image folder as a few tar files with an index: one read an image, less to decode",
        description="Packs the image folder SRC into OUT, on all cores; given again it goes on. Train from it with"
        " data.source=pack data.root=OUT: ids, order and labels are those of the folder.",
    )  # fmt: skip
    pack.add_argument("src", type=_path, metavar="SRC")
    pack.add_argument("out", type=_path, metavar="OUT")
    pack.add_argument(
        "--level", default="lossless", metavar="LEVEL",
        help="lossless: JPEGs with restart markers, the same pixels; max-side=500,q=90: encoded anew, lossy; raw=256:"
        " pixels, the shorter side scaled to 256 (default lossless)",
    )  # fmt: skip
    pack.add_argument("--val-split", type=float, default=0.1, metavar="SHARE", help="as data.val_split (default 0.1)")
    pack.set_defaults(run=_data_pack)
    check = data.add_parser(
        "check", help="layout, sums and decodability of an image folder or a pack; names each defect"
    )
    check.add_argument("root", type=_path, metavar="FOLDER")
    check.add_argument("--write-sums", action="store_true", help="write SHA256SUMS, which later checks compare with")
    check.add_argument("--val-split", type=float, default=0.1, metavar="SHARE", help="as data.val_split (default 0.1)")
    check.set_defaults(run=_data_check)


def _add_machine_commands(commands: "argparse._SubParsersAction[_Parser]") -> None:
    doctor = commands.add_parser("doctor", help="what would go wrong here, before it does; exit 0 if RECIPE can run")
    doctor.add_argument("recipe", nargs="?", type=_place, default="digits", metavar="RECIPE", help="default digits")
    doctor.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=_OVERRIDES)
    doctor.add_argument(
        "--world", type=_count, metavar="N", help="processes in the whole job (default: the node's, or 1)"
    )
    doctor.add_argument(
        "--nodes", type=_count, metavar="M", help="machines that they are spread over (default as above)"
    )
    doctor.add_argument("--json", action="store_true", help="findings for machines")
    doctor.add_argument(
        "--sanity", action="store_true",
        help="also train a little on your data: first loss, one batch learnt by heart, shuffled labels not learnt",
    )  # fmt: skip
    doctor.set_defaults(run=_doctor)

    rehearse = commands.add_parser(
        "rehearse", help="the multi-node job on this machine, one container a node",
        description="Runs RECIPE in --nodes containers that see each other as the pods of the Kubernetes job do. Data is"
        " what --data shows them as /data. A node that fails is replaced; all is removed at the end.",
    )  # fmt: skip
    rehearse.add_argument("recipe", type=_place, metavar="RECIPE")
    rehearse.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=_OVERRIDES)
    rehearse.add_argument("--nodes", type=_count, required=True, metavar="N", help="containers")
    rehearse.add_argument("--nproc", type=_count, default=1, metavar="M", help="processes in each (default 1)")
    rehearse.add_argument("--gpus", type=_count, default=0, metavar="G", help="GPUs for each (default none: CPU)")
    rehearse.add_argument("--image", default="ddp-pipeline", help="image to run (default ddp-pipeline)")
    rehearse.add_argument("--data", type=_path, metavar="FOLDER", help="seen by the nodes, read-only, as /data")
    rehearse.add_argument(
        "--runs", metavar="VOLUME", help="Docker volume for /runs, kept (default: one that is removed)"
    )
    rehearse.add_argument(
        "--kill", type=_kill, action="append", default=[], metavar="NODE@STEP",
        help="SIGKILL a node once that step is reported; may be given often",
    )  # fmt: skip
    rehearse.add_argument(
        "--cut", type=_cut, action="append", default=[], metavar="NODE@STEP:SECONDS",
        help="take a node's network away for so long; may be given often",
    )  # fmt: skip
    rehearse.add_argument(
        "--env", type=_variable, action="append", default=[], metavar="NAME=VALUE", help="a variable of the nodes"
    )
    rehearse.set_defaults(run=_rehearse)

    k8s = commands.add_parser("k8s", help="manifests of the cluster job").add_subparsers(
        metavar="ACTION", required=True
    )
    render = k8s.add_parser(
        "render", help="write the manifests for a recipe, an image, N nodes and G GPUs a node",
        description="Prints the manifests, or writes them to --out. Without options they are those of k8s/.",
        argument_default=argparse.SUPPRESS,  # what is not given has its default where it is rendered
    )  # fmt: skip
    add = render.add_argument
    add("recipe", nargs="?", type=_place, metavar="RECIPE", help="default digits")
    add("overrides", nargs="*", default=[], metavar="key=value", help=_OVERRIDES)
    add("--nodes", type=_count, metavar="N", help="pods (default 2)")
    add("--gpus", type=_count, metavar="G", help="GPUs, and processes, of each (default 1)")
    add("--cpu", action="store_const", const=0, dest="gpus", help="no GPUs")
    add("--nproc", type=_count, metavar="M", help="processes of each without GPUs (default 1)")
    add("--image", type=_word, help="in a registry that the nodes can pull from, best by digest")
    add("--mlflow-image", type=_word, metavar="IMAGE", help="likewise")
    add(
        "--mlflow-auth",
        action="store_true",
        help="MLflow asks for the password of your Secrets mlflow-auth and -credentials",
    )
    add("--pull-secret", type=_word, metavar="NAME", help="the registry's credentials, a Secret there")
    add("--namespace", type=_word, metavar="NAME", help="default ddp-pipeline")
    add("--storage-class", type=_word, metavar="NAME", help="one that gives ReadWriteMany (default: the cluster's own)")
    add("--single-node", action="store_true", help="all pods on one machine (kind, minikube): ReadWriteOnce will do")
    add("--cpus", type=_count, metavar="C", help="CPUs of each pod (default 8 a GPU, 2 a process without)")
    add("--memory", type=_quantity, help="of each pod, 64Gi for example (default 24Gi a GPU, 4Gi without)")
    add("--shm", type=_quantity, help="/dev/shm of each pod, out of its memory (default 8Gi a GPU, 1Gi without)")
    add("--out", type=_path, default=None, metavar="FOLDER", help="folder to write them to")
    render.set_defaults(run=_render)


def _add_bench_commands(commands: "argparse._SubParsersAction[_Parser]") -> None:
    bench = commands.add_parser("bench", help="throughput, with the comparison stated")
    subjects = bench.add_subparsers(metavar="SUBJECT", required=True)
    steps = subjects.add_parser("train", help="our loop against the barest torch loop with the same model and batch")
    _add_turns(steps, steps=8)
    steps.set_defaults(run=_bench_train)
    tracked = subjects.add_parser("track", help="what journal and tracker cost a step: our loop with them and without")
    _add_turns(tracked, steps=20)
    tracked.set_defaults(run=_bench_track)
    feed = subjects.add_parser(
        "data", help="images/s of the loader, from plain files and from packs, against the usual one",
        description="The whole loader, two workers, on at most 2,000 of the images of DIR, which are packed for it.",
    )  # fmt: skip
    feed.add_argument("--images", type=_path, required=True, metavar="DIR", help="an image folder, of photos best")
    feed.add_argument("--rounds", type=_count, default=7, metavar="N", help="interleaved rounds (default 7)")
    feed.add_argument("--steps", type=_count, default=8, metavar="N", help="batches a round (default 8)")
    feed.add_argument(
        "--peers", nargs="?", type=_path, const=Path("build/peers"), metavar="ENV",
        help="also other loaders, which pip installs in a virtual environment of their own (default build/peers)",
    )  # fmt: skip
    feed.add_argument(
        "--write", type=_path, metavar="FOLDER", help="also write benchmarks.md and a plot there, as in docs"
    )
    feed.add_argument("--json", action="store_true", help="rows for machines")
    feed.set_defaults(run=_bench_data)
    gpu = subjects.add_parser(
        "gpu", help="all that wants a GPU to be shown, in under 8 minutes on one, with a short table last"
    )
    gpu.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=_OVERRIDES)
    gpu.add_argument(
        "--images", type=_path, metavar="DIR", help="an image folder of photos (default: patterns are made)"
    )
    gpu.add_argument("--batch", type=_count, default=256, metavar="N", help="images a step (default 256)")
    gpu.set_defaults(run=_bench_gpu)
    top1 = subjects.add_parser(
        "top1", help="top-1 of a recipe against a plain torchvision loop that trains for the same seconds",
        description="RECIPE, as 'pipeline train' runs it, then the plain loop, for as many seconds, on the same folder.",
    )  # fmt: skip
    top1.add_argument("recipe", type=_place, metavar="RECIPE")
    top1.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=_OVERRIDES)
    top1.add_argument("--seeds", type=_count, default=3, metavar="N", help="times, each from another seed (default 3)")
    top1.set_defaults(run=_bench_top1)
    comm = subjects.add_parser("comm", help="how gradients meet: exact mode against DDP, in one group of processes")
    comm.add_argument("--nproc", type=_count, metavar="N", help="start N processes on this machine")
    _add_turns(comm, steps=8)
    comm.set_defaults(run=_bench_comm)


def _add_turns(loops: argparse.ArgumentParser, steps: int) -> None:
    """What a benchmark of loops that take turns is told."""
    loops.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=_OVERRIDES)
    loops.add_argument("--rounds", type=_count, default=7, metavar="N", help="interleaved rounds (default 7)")
    loops.add_argument("--steps", type=_count, default=steps, metavar="N", help=f"steps a round (default {steps})")
    loops.add_argument("--json", action="store_true", help="rows for machines")


def _place(text: str) -> str:
    """A path, or the address of a model: no shell expands `~` in `--out=~/x`, in quotes or in a manifest."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not a path")
    return os.path.expanduser(text)


def _path(text: str) -> Path:
    return Path(_place(text))


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _word(text: str) -> str:
    if not re.fullmatch(r"[\w./:@-]+", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is not a name: letters, digits and . / : @ - _")
    return text


def _quantity(text: str) -> str:
    if not re.fullmatch(r"[1-9]\d*[MGT]i", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is not an amount of memory: 512Mi or 64Gi for example")
    return text


def _kill(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)@(\d+)", text, re.ASCII)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not NODE@STEP, 1@40 for example")
    return int(match[1]), int(match[2])


def _cut(text: str) -> tuple[int, int, float]:
    match = re.fullmatch(r"(\d+)@(\d+):(\d+(?:\.\d+)?)", text, re.ASCII)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not NODE@STEP:SECONDS, 1@40:5 for example")
    return int(match[1]), int(match[2]), float(match[3])


def _variable(text: str) -> str:
    if not text.partition("=")[0] or "=" not in text:
        raise argparse.ArgumentTypeError(f"{text.partition('=')[0]!r} is not NAME=VALUE")
    return text


def _train(options: argparse.Namespace) -> str | int:
    faulthandler.register(signal.SIGUSR1)  # says where each thread stands, of a rank and of its loader workers
    stop = StopRequest()
    if not (options.nproc and options.nproc > 1):
        stop.listen()
    if world.launch_name() is not None:
        world.die_with_agent()

    from pipeline.operate import launch
    from pipeline.record.terminal import QUIET

    if options.quiet:
        os.environ[QUIET] = "1"

    return launch.train(options.recipe, options.overrides, options.nproc, stop)


def _evaluate(options: argparse.Namespace) -> str | int:
    from pipeline.operate import launch

    return launch.evaluate(options.target, options.overrides, options.nproc)


def _predict(options: argparse.Namespace) -> str:
    from pipeline.operate import predict

    return predict.predict(options.target, options.images, as_json=options.json, sheet=options.sheet)


def _verify(options: argparse.Namespace) -> str | int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the repetition and its folder go with us

    from pipeline.operate import verify

    return verify.verify(options.run_dir, options.steps)


def _export(options: argparse.Namespace) -> str:
    from pipeline.operate import export

    return export.export(options.target, options.to, options.out, options.overrides)


def _plan(options: argparse.Namespace) -> str:
    from pipeline.config import load
    from pipeline.data.sources import size_of
    from pipeline.plan import make_plan, memory_row

    config = load(options.recipe, options.overrides)
    place = world.World(cpus=world.allowed_cpus(), has_gpu=world.shows_gpu()).resized(options.world, options.nodes)
    plan = make_plan(config, place, size_of(config))

    from pipeline.model.architectures import count_parameters  # imports torch: last, so that a mistake is said at once

    parameters = count_parameters(config.model, plan.num_classes)
    return f"{config.recipe}\n{plan.table()}\n{memory_row(config, parameters, plan.world)}"


def _data_make(options: argparse.Namespace) -> str:
    from pipeline.operate import data

    return data.make(options.kind, options.out, options.images, options.classes, options.side)


def _data_get(options: argparse.Namespace) -> str:
    from pipeline.operate import data

    return data.get(options.kind, options.out)


def _data_import(options: argparse.Namespace) -> str:
    from pipeline.operate import data

    return data.import_imagenet(options.archives, options.out, options.pack)


def _data_pack(options: argparse.Namespace) -> str:
    from pipeline.operate import pack

    return pack.pack(options.src, options.out, options.level, options.val_split)


def _data_check(options: argparse.Namespace) -> str:
    from pipeline.operate import data

    return data.check(options.root, options.val_split, write_sums=options.write_sums)


def _report(options: argparse.Namespace) -> str:
    from pipeline.operate.report import report

    return report(options.run_dir)


def _sync(options: argparse.Namespace) -> str:
    from pipeline.record.mlflow import sync

    sync(options.run_dir, follow=options.follow)
    return f"{options.run_dir} is delivered"


def _doctor(options: argparse.Namespace) -> str | int:
    from pipeline.operate import doctor

    return doctor.examine(
        options.recipe,
        options.overrides,
        options.world,
        options.nodes,
        as_json=options.json,
        with_sanity=options.sanity,
    )


def _render(options: argparse.Namespace) -> str:
    from pipeline.operate.render import Request, render, write

    given = {field.name: getattr(options, field.name) for field in fields(Request) if hasattr(options, field.name)}
    manifests = render(Request(**{**given, "overrides": tuple(options.overrides)}))
    if options.out is None:
        return "---\n".join(manifests.values()).rstrip()
    write(manifests, options.out)
    return f"{len(manifests)} manifests are in {options.out}: kubectl apply -f {options.out}"


def _rehearse(options: argparse.Namespace) -> str | int:
    from pipeline.operate.rehearse import Fault, Request, rehearse

    if options.data and not os.path.isdir(options.data):
        raise RequestError(f"--data {options.data} is not a folder")
    request = Request(
        recipe=options.recipe, overrides=options.overrides, num_nodes=options.nodes, nproc=options.nproc,
        gpus=options.gpus, image=options.image, data=options.data, runs=options.runs, env=tuple(options.env),
        faults=tuple(Fault(*fault) for fault in (*options.kill, *options.cut)),
    )  # fmt: skip
    return rehearse(request)


def _bench_train(options: argparse.Namespace) -> str:
    from pipeline.operate import bench

    return bench.train(options.overrides, options.rounds, options.steps, as_json=options.json)


def _bench_track(options: argparse.Namespace) -> str:
    from pipeline.operate import bench

    return bench.track(options.overrides, options.rounds, options.steps, as_json=options.json)


def _bench_data(options: argparse.Namespace) -> str:
    from pipeline.operate import feed

    return feed.data(
        options.images, options.rounds, options.steps, peers=options.peers, write=options.write, as_json=options.json
    )


def _bench_gpu(options: argparse.Namespace) -> str:
    from pipeline.operate import programme

    return programme.gpu(options.images, options.overrides, options.batch)


def _bench_top1(options: argparse.Namespace) -> str:
    from pipeline.operate import contest

    return contest.top1(options.recipe, options.overrides, options.seeds)


def _bench_comm(options: argparse.Namespace) -> str | int:
    from pipeline.operate import bench, launch

    if options.nproc and options.nproc > 1:
        numbers = ["--rounds", str(options.rounds), "--steps", str(options.steps)]
        flags = [*numbers, *(["--json"] if options.json else [])]
        return launch.start_processes(options.nproc, ["bench", "comm", *options.overrides, *flags])
    return bench.comm(options.overrides, options.rounds, options.steps, as_json=options.json)


if __name__ == "__main__":
    command()

"""The rendezvous of several nodes: who forms the next world, and real torchrun agents that use it.

The agents run on this machine. tests/faults/test_nodes.py has them in network namespaces, frozen.
"""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import forked
import harness
import jsonschema
import pytest
import yaml
from faults.ledger import Notes
from harness import SHARING, SMALL, Job, before_each, children, environment, free_port, kill, read_rows
from object_store import Bucket

from pipeline.addons.deploy.membership import LOST_S, STOPPING_S, Membership, Node
from pipeline.record.checkpoint_files import step_of

LEADER = 1


def nodes(count: int, now: float = 0) -> dict[int, Node]:
    """Return agents that have just come, on hosts trainer-0 and so on."""
    return {key: Node(f"trainer-{key - 1}", heard=now) for key in range(1, count + 1)}


def train(found: dict[int, Node], membership: Membership, now: float) -> None:
    """Have the members of the current round run their ranks."""
    for key in membership.round.members:
        found[key] = replace(found[key], is_waiting=False, round=membership.round.number, heard=now)


def test_ranks_are_in_the_order_of_host_names_the_leader_first_without_a_node_that_was_just_killed() -> None:
    hosts = ("b-3", "b-10", "killed", "b-2", "a-1")
    found = {key: Node(host, heard=12 if host == "killed" else 20) for key, host in enumerate(hosts, 1)}
    assert Membership(LEADER, [4]).update(found, 20).members == (1, 5, 4, 2)


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_silent_node_ends_the_round_and_the_others_continue_once_stopped(comes_back: bool) -> None:
    membership, found = Membership(LEADER, [1, 2, 3]), nodes(3)
    membership.update(found, 0)
    train(found, membership, now=5)
    heard = 5 + LOST_S
    for key in (1, 3):
        found[key] = replace(found[key], heard=heard)
    assert not membership.update(found, heard).is_over
    over = membership.update(found, heard + 1)
    assert over.is_over
    assert over.reason.startswith("trainer-1 ")
    found[1] = replace(found[1], is_waiting=True)
    assert membership.update(found, heard + 2).is_over, "trainer-2 is still stopping its ranks"
    later = heard + 1 + STOPPING_S
    for key in (1, 3):
        found[key] = replace(found[key], heard=later, is_waiting=key == 1 or comes_back)
    assert membership.update(found, later).members == ((1, 3) if comes_back else (1,))


def test_a_node_that_would_not_make_the_world_larger_does_not_end_the_round() -> None:
    membership, found = Membership(LEADER, [1, 2, 4]), nodes(2, now=15)
    membership.update(found, 15)
    train(found, membership, now=16)
    for key, is_over in ((3, False), (4, True)):
        found[key] = Node(f"trainer-{key - 1}", arrived=1)
        found = {key: replace(node, heard=100) for key, node in found.items()}
        assert membership.update(found, 100).is_over == is_over
    assert membership.round.reason == "trainer-2, trainer-3 can join"


SOONER = """
from pipeline.addons.deploy import membership, rendezvous
membership._SETTLE_S = 3
membership.LOST_S = rendezvous.LOST_S = 8
""" + before_each("pipeline.train.loop.update_once", "time.sleep(0.1)")


class Agents(Job):
    """A training by torchrun agents on this machine, forks; the first is never stopped."""

    starts_before = 0

    def __init__(
        self, folder: Path, digits: Path, nnodes: str, *words: str, conf: str = "join_timeout=120"
    ) -> None:
        words = ("digits", f"data.root={digits}", *SMALL, "checkpoint.every=4 steps", *words)
        super().__init__(folder / "run", list(words))
        self.port, self.logs = free_port(), list[Path]()
        self.options = [f"--nnodes={nnodes}", "--rdzv-backend=pipeline", f"--rdzv-conf={conf}",
                        f"--rdzv-endpoint=localhost:{self.port}", "--max-restarts=1000",
                        "--rdzv-id=test"]  # fmt: skip
        self.running: list[forked.Process] = []

    def start(self, prelude: str = "") -> "Agents":
        """Start one more agent."""
        log = self.folder.parent / f"agent-{len(self.logs)}.log"
        command = [*harness.torchrun(1, *self.options)[2:], *self.train_words()]
        self.running.append(forked.server().start(command, environment(), (log, log), SOONER + prelude))
        self.process = self.running[0]
        self.logs.append(log)
        return self

    def stop(self, number: int, place: int = -1) -> None:
        """Send a signal to an agent, that of the latest start if not told: a spot node goes."""
        agent = self.running.pop(place)
        kill(agent.pid, number)
        agent.wait(60)
        self.process = (self.running or [agent])[0]

    def wait_for_leader(self) -> None:
        """Wait until an agent leads: other agents can connect to it."""
        pids = [agent.pid for agent in self.running]
        self.wait_until(lambda: self.port in {port for _, port in harness.listening(pids)}, "leader")

    def wait_for_world(self, size: int) -> int:
        """Wait until a step is made by `size` processes; return it."""

        def step() -> int:
            *_, start = {"tags": {"world": 0}, "step": 0}, *self.starts()
            step = self.step()
            return step if start["tags"]["world"] == size and step > start["step"] else 0

        return int(self.wait_until(step, f"world of {size}"))

    def log(self) -> str:
        return "\n".join(f"== {log.name}\n{log.read_text()[-3000:]}" for log in self.logs)

    def __enter__(self) -> "Agents":
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.running:
            kill(agent.pid, signal.SIGKILL)
        self.clean()


@pytest.mark.fault("M1", ci=1, long=5)
def test_nodes_that_come_and_go_do_not_change_the_run(tmp_path: Path, digits: Path, seed: int) -> None:
    """The worlds are 2, 1, 2, 3 and 1; nodes leave by SIGTERM (drained) or SIGKILL (lost)."""
    draw = random.Random(seed)
    words = ("run.exact=true", "exact.shards=6", "train.epochs=1000")
    with Agents(tmp_path, digits, "1:3", *words) as run:
        run.start().start()
        for size, change in ((2, -1), (1, 1), (2, 1), (3, -2), (1, -1)):
            run.wait_for_step(run.wait_for_world(size) + draw.randint(1, 5))
            for _ in range(change):
                run.start()
            for _ in range(-change):
                is_last = len(run.running) == 1
                run.stop(signal.SIGTERM if is_last else draw.choice((signal.SIGTERM, signal.SIGKILL)))
    resized = [row for row in read_rows(run.folder / "journal.jsonl") if row.get("event") == "resized"]
    sizes = [(row["before"], row["processes"]) for row in resized]
    assert sizes == [(2, 1), (1, 2), (2, 3), (3, 1)], run.log()
    run.assert_each_sample_once()
    until = [*run.arguments, f"train.max_steps={run.step()}"]
    whole = Job(tmp_path / "whole", until).finished()
    assert run.trace() == whole.trace(), "the same samples in the same order, of the same pixels"
    assert Job(run.folder, until).run().out == whole.output()


def test_a_node_that_is_lost_before_its_ranks_start_costs_one_round(tmp_path: Path, digits: Path) -> None:
    with Agents(tmp_path, digits, "1:2", "train.epochs=1000") as agents:
        function = "pipeline.addons.deploy.rendezvous.Rendezvous._are_all_here"
        agents.start().start(before_each(function, "os.kill(os.getpid(), 9)"))
        agents.wait_for_world(1)
    assert "was lost before it began" in agents.log()


def test_a_world_that_does_not_divide_the_batch_is_never_formed(tmp_path: Path, digits: Path) -> None:
    conf = "join_timeout=120,allowed_nodes=1+2"
    with Agents(tmp_path, digits, "1:3", "train.epochs=1000", "batch.global=32", conf=conf) as agents:
        agents.start().start().start()
        agents.wait_for_world(2)
        (waiting,) = [agent for agent in agents.running if not children(agent.pid)]
        agents.stop(signal.SIGTERM, agents.running.index(waiting))  # a signal ends a wait
    assert {row["tags"]["world"] for row in agents.starts()} == {2}


@pytest.mark.parametrize(
    ("nodes", "conf", "word", "code", "says"),
    [("2", "join_timeout=3", "", 75, "(1 of 2 are here: "),
     ("1:3", "allowed_nodes=4+8", "", 2, "allowed_nodes=4+8 in --rdzv-conf has no number from 1 to 3"),
     ("1:2", "join_timeout=120", "run.resume=never", 1, "name this job with torchrun's --rdzv-id NAME")],
    ids=["no peer", "wrong option", "no id"],
)  # fmt: skip
def test_an_agent_that_cannot_train_says_why(
    tmp_path: Path, digits: Path, nodes: str, conf: str, word: str, code: int, says: str
) -> None:
    with Agents(tmp_path, digits, nodes, *filter(None, [word]), conf=conf) as agents:
        if word:
            agents.options.remove("--rdzv-id=test")
        assert agents.start().running[0].wait(120) == code, agents.log()
    assert says in agents.log()
    assert code == 1 or "Traceback" not in agents.log()
    assert not agents.starts()


NEIGHBOURS = json.loads((Path(__file__).parent / "neighbours.json").read_text())
"""The top level of the schemas of SkyPilot's tasks and resources, and of dstack's tasks."""


@pytest.mark.parametrize("name", ["dstack", pytest.param("SkyPilot", marks=pytest.mark.full)])
def test_tasks_for_skypilot_and_dstack_are_valid_and_train(tmp_path: Path, digits: Path, name: str) -> None:
    task = yaml.safe_load((Path(__file__).parents[1] / f"docs/{name.lower()}.yaml").read_text())
    (schema,) = (schema for title, schema in NEIGHBOURS.items() if title.startswith(name))
    jsonschema.validate(task, schema)
    command = task["run"] if name == "SkyPilot" else "\n".join(task["commands"])
    command = command.replace("torchrun", f"{sys.executable} -m torch.distributed.run")
    command = command.replace(":29500", f":{free_port()}")
    small = [word for word in SMALL if " " not in word]  # the shell splits $TRAIN
    words = ("digits", f"data.root={digits}", f"run.dir={tmp_path / 'run'}", *small, "train.max_steps=2")
    env = environment(
        TRAIN=" ".join(words), SKYPILOT_NUM_NODES="2", SKYPILOT_NUM_GPUS_PER_NODE="1",
        SKYPILOT_NODE_IPS="127.0.0.1\n127.0.0.2", DSTACK_NODES_NUM="2", DSTACK_GPUS_PER_NODE="1",
        DSTACK_MASTER_NODE_IP="127.0.0.1",
    )  # fmt: skip
    agents = [subprocess.Popen(["bash", "-ec", command], env=env, stdout=subprocess.PIPE) for _ in range(2)]
    try:
        output = b"".join(agent.communicate(timeout=120 * SHARING)[0] for agent in agents)
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0]
    assert output.count(b"done step=2 ") == 1


@pytest.mark.full
@pytest.mark.fault("K5", ci=1, long=10)
@pytest.mark.usefixtures("jpegtran")
def test_node_0_lost_with_its_disk_continues_from_the_bucket(
    tmp_path: Path, digits: Path, bucket: Bucket, seed: int, notes: Notes
) -> None:
    """Each node has a disk of its own. That of the new rank 0 has nothing of the run."""
    assert harness.quick("data", "pack", str(digits), f"{bucket.place}/data").code == 0
    length = ("run.exact=true", "train.epochs=100", "train.max_steps=80", "evaluate.every=1000 epochs")
    places = ("data.source=pack", f"data.root={bucket.place}/data", f"checkpoint.mirror={bucket.place}/run")
    disks = [tmp_path / f"disk-{number}" for number in range(3)]
    with Agents(tmp_path, digits, "2", *length, *places) as run:
        for run.folder in disks[:2]:
            run.start().wait_for_leader()
        run.folder = disks[0]
        run.wait_for_step(run.wait_for_world(2) + random.Random(seed).randint(8, 20))
        lost, began = run.running[0].pid, time.monotonic()
        run.stop(signal.SIGKILL, 0)
        harness.wait_until(lambda: not children(lost), "end of its ranks")
        shutil.rmtree(disks[0])
        run.folder = disks[2]
        run.wait_for_leader()
        run.start()
        run.folder = disks[1]
        run.wait_for_world(2)
        notes.note("K5", seconds=time.monotonic() - began)
        assert run.running[0].wait(120 * SHARING) == 0, run.log()
    assert [row["step"] > 0 for row in run.starts()] == [False, True], "it continues"
    assert bucket.read("run/journal.jsonl") == (run.folder / "journal.jsonl").read_bytes()
    whole = Job(tmp_path / "whole", ["digits", f"data.root={digits}", *SMALL, *length])
    whole.run()
    harness.assert_same(run, whole)


def test_nodes_that_come_and_are_replaced_do_not_apply_run_resume_again(tmp_path: Path, digits: Path) -> None:
    """A node joins, then node 0 is lost and replaced: torchrun counts no restart of the ranks."""
    with Agents(tmp_path, digits, "1:2", "train.epochs=1000", "checkpoint.keep=10") as run:
        before = Job(run.folder, [*run.arguments, "train.max_steps=8"]).finished()
        (checkpoint,) = [path for path in before.checkpoints() if step_of(path) == 4]
        run.arguments.append(f"run.resume={checkpoint}")
        count = len(run.starts())
        run.start().wait_until(lambda: len(run.starts()) > count, "start")
        for change in (1, -1, 1):
            size = run.starts()[-1]["tags"]["world"]
            run.wait_for_step(run.wait_for_world(size) + 5)
            if change > 0:
                run.start()
            else:
                run.stop(signal.SIGKILL, 0)
            run.wait_for_world(size + change)
    first, *steps = [row["step"] for row in run.starts()[count:]]
    assert first == 4 < steps[0], run.log()
    assert steps == sorted(set(steps)), run.log()
    assert len([*run.folder.glob("before-*")]) == 1, "set aside once"

"""A kubectl that plays a cluster on which one Job at a time trains: for tests/test_on_cluster.py.

Its state is in the folder FAKE_CLUSTER: `state.json`, and `calls.jsonl` with each call. Training
advances by some steps with each question about the Job or its journal. `quirks` in the state make
the cluster misbehave; test_on_cluster.py says how.
"""

import json
import os
import sys
from pathlib import Path

FOLDER = Path(os.environ["FAKE_CLUSTER"])
STEPS, ADVANCE, LEAVING = 168, 20, 3


class Fake:
    def __init__(self):
        self.state = json.loads((FOLDER / "state.json").read_text())
        self.quirks = self.state["quirks"]
        self.job = self.state.setdefault("job", {})
        self.runs = self.state.setdefault("runs", {})

    def save(self):
        (FOLDER / "state.json").write_text(json.dumps(self.state))

    # the training

    @property
    def rows(self):
        return self.runs.setdefault(self.job.get("run", "none"), [])

    def step(self):
        return max((row.get("step", 0) for row in self.rows), default=0)

    def start(self, nodes=None):
        """Append what a start writes: it resumes from the last checkpoint, one each 10 steps."""
        self.rows[:] = [row for row in self.rows if row.get("step", 0) <= self.step() // 10 * 10]
        tags = {"world": nodes or self.job["nodes"], "processes_a_node": 1}
        self.rows.append({"event": "started", "step": self.step(), "tags": tags})

    def advance(self):
        if not self.job or self.job["suspended"] or self.job["pods"] < self.job["nodes"] or self.end():
            return
        if not self.rows:
            self.start()
        if self.is_finished():  # the pods succeed some questions later
            self.job["leaving"] -= 1
            if not self.job["leaving"]:
                self.job["end"] = ["Complete", "CompletionsReached"]
            return
        if self.job.pop("smaller", False):
            self.start()
        for _ in range(ADVANCE // 2):
            if self.step() < STEPS:
                metrics = {"system/trainer-0/rss_mib": 900.0, "train/loss": 1.0}
                self.rows.append({"step": self.step() + 2, "metrics": metrics})
        if self.quirks.get("fails") == self.job["run"] and self.step() > 100:
            self.job["end"] = ["Failed", "BackoffLimitExceeded"]
        elif self.step() >= STEPS:
            weights = "sha256:" + self.quirks.get(f"weights of {self.job['run']}", "5a3e")
            self.rows.append(
                {"event": "ended", "status": "FINISHED", "step": STEPS, "line": f"done weights={weights}"}
            )
            self.job["leaving"] = LEAVING
            if self.state["mlflow"]:
                self.state["sent"].append(self.job["run"])

    def end(self):
        return self.job.get("end")

    def is_finished(self):
        return any(row.get("status") == "FINISHED" for row in self.rows)

    def replace(self, index):
        """Give the index a new pod, with which training starts again.

        An elastic job trains on the other node until then.
        """
        if self.end():
            return
        self.job["generations"][index] += 1
        if self.is_finished():
            return
        if self.job["is elastic"] and not self.quirks.get("never shrinks"):
            self.start(nodes=1)
            self.job["smaller"] = True
        else:
            self.start()

    def pods(self, index=None):
        found = []
        if not self.job or self.job["suspended"]:
            return found
        for i in range(self.job["pods"]):
            ended = {"terminated": {"exitCode": 0}}
            status = {
                "phase": "Succeeded" if self.end() else "Running",
                "initContainerStatuses": [{"name": name, "state": ended} for name in self.job["init"]],
                "containerStatuses": [
                    {
                        "name": "trainer",
                        "restartCount": 1,
                        "state": ended if self.end() else {"running": {}},
                    }
                ],
            }
            metadata = {"name": f"trainer-{i}-{self.job['generations'][i]}"}
            if index in (None, i):
                found.append({"metadata": metadata, "spec": {"nodeName": f"node-{i}"}, "status": status})
        return found

    # the commands

    def get(self, words, flags):
        kind, name = words[0], words[1] if len(words) > 1 else None
        if kind == "namespace":
            return json.dumps(self.state["namespace"]) if self.state["namespace"] else ""
        if kind == "job" and name == "trainer":
            self.advance()
            conditions = (
                [{"type": self.end()[0], "status": "True", "reason": self.end()[1]}] if self.end() else []
            )
            return json.dumps({"status": {"conditions": conditions}})
        if kind == "job":
            return json.dumps({"status": {"conditions": [{"type": "Complete", "status": "True"}]}})
        if kind == "pods":
            index = flags.get("--selector", "").partition("completion-index=")[2]
            return json.dumps({"items": self.pods(int(index) if index else None)})
        if kind == "pod" and name != "helper":
            return f"pod/{name}" if name in [pod["metadata"]["name"] for pod in self.pods()] else ""
        return f"{kind}/{name}"

    def apply(self, documents):
        if any("namespace" not in document["metadata"] for document in documents):
            sys.exit("a document without a namespace")
        for document in documents:
            if document["kind"] == "ConfigMap" and document["metadata"]["name"] == "trainer":
                self.state["run"] = document["data"]["RUN_DIR"].removeprefix("/runs/")
                self.state["is elastic"] = ":" in document["data"]["PET_NNODES"]
            if document["kind"] == "Job" and document["metadata"]["name"] == "trainer":
                spec = document["spec"]
                self.job.update(
                    run=self.state["run"], nodes=spec["completions"], pods=spec["parallelism"], suspended=False,
                    generations=[0] * spec["completions"], end=None, **{"is elastic": self.state["is elastic"]},
                    init=[container["name"] for container in spec["template"]["spec"]["initContainers"]],
                )  # fmt: skip
            elif document["kind"] == "Job":
                self.state["sent"].append(self.job["run"])

    def patch(self, spec):
        if "suspend" in spec:
            self.job["suspended"] = spec["suspend"]
            if not spec["suspend"]:
                self.start()
        self.job["pods"] = spec.get("parallelism", self.job["pods"])

    def execute(self, target, words):
        if target == "deployment/mlflow":
            run = words[-1]
            points = [[key, row["step"]] for row in self.runs.get(run, []) for key in row.get("metrics", {})]
            if run not in self.state["sent"]:
                return json.dumps([{"status": "RUNNING", "points": points[:5]}])
            points += points[:1] * self.quirks.get("twice", 0)
            points = points[self.quirks.get("lost", 0) :]
            points += [["system/of_another_program", 0]] * 2
            return json.dumps([{"status": "FINISHED", "points": points}] * self.quirks.get("runs", 1))
        if target != "helper":
            self.replace(1)  # a rank is killed
            return ""
        if words[0] == "cat":
            self.advance()
            rows = self.runs.get(words[1].split("/")[2])
            if rows is None:
                sys.exit("No such file")
            return "".join(f"{json.dumps(row)}\n" for row in rows)
        return self.state["hash"]

    def run(self, verb, words, flags, text):
        if verb == "get":
            return self.get(words, flags)
        if verb == "create" and "--raw" in flags:
            pod = flags["--raw"].split("/")[-2]
            self.replace(int(pod.split("-")[1]))
        elif verb == "create":
            self.state["namespace"] = json.loads(text)
        elif verb == "apply":
            self.apply(json.loads(text)["items"])
        elif verb == "patch":
            self.patch(json.loads(flags["--patch"])["spec"])
        elif verb == "scale":
            self.state["mlflow"] = int(flags["--replicas"])
        elif verb == "exec":
            return self.execute(words[0], words[words.index("--") + 1 :])
        elif verb == "delete" and words[0] == "namespace":
            self.state["namespace"] = None
        elif verb == "delete" and words[0] == "job":
            self.job.clear()
        elif verb == "delete":
            if words[1] != "helper":
                self.replace(int(words[1].split("-")[1]))
        elif verb == "freeze":
            if self.quirks.get("freeze fails"):
                sys.exit("no such node")
            self.replace(int(words[0].split("-")[1]))
        elif verb == "thaw":
            self.state["hash"] += self.quirks.get("written after the thaw", "")
        elif verb in ("logs", "describe"):
            return f"{verb} of {words[0]}"
        elif verb not in ("rollout", "wait"):
            sys.exit(f"unknown command {verb}")
        return "done"


def main():
    arguments = sys.argv[1:]
    text = "" if sys.stdin.isatty() else sys.stdin.read()
    with open(FOLDER / "calls.jsonl", "a") as file:
        file.write(json.dumps({"arguments": arguments, "text": text}) + "\n")
    if arguments[0] == "--namespace":
        arguments = arguments[2:]
    verb, *rest = arguments
    words, flags = [], {}
    while rest:
        word = rest.pop(0)
        if word == "--":
            words += [word, *rest]
            break
        name, equals, value = word.partition("=")
        if not word.startswith("--"):
            words.append(word)
        elif equals or name in ("--ignore-not-found", "--timestamps", "--previous", "--force"):
            flags[name] = value
        else:
            flags[name] = rest.pop(0)
    fake = Fake()
    print(fake.run(verb, words, flags, text))
    fake.save()


if __name__ == "__main__":
    main()

"""Configuration: read, typed, checked and written back; every mistake is one line with a remedy."""

import random
from collections.abc import Callable
from pathlib import Path

import harness
import pytest
import yaml
from faults.ledger import Notes

from pipeline.addons.ops.credentials import hide_credentials, split_credentials, without_password
from pipeline.addons.ops.fixed_keys import refuse_changes
from pipeline.addons.ops.keys import all_keys, describe_keys
from pipeline.config.load import RECIPES, from_yaml, load
from pipeline.config.values import Duration
from pipeline.errors import RequestError

DIGITS = (RECIPES / "digits.yaml").read_text()
Write = Callable[[str | bytes], str]


def refused(recipe: str, *overrides: str) -> str:
    return harness.refused(lambda: load(recipe, list(overrides)))


@pytest.fixture
def write(tmp_path: Path) -> Write:
    path = tmp_path / "mine.yaml"

    def write(text: str | bytes) -> str:
        path.write_bytes(text.encode(errors="surrogatepass") if isinstance(text, str) else text)
        return str(path)

    return write


def test_a_configuration_round_trips_through_yaml() -> None:
    changed = load(
        "digits",
        ["run.seed=9223372036854775807", "schedule.warmup=2.5 %", "checkpoint.every=0.000001 epochs",
         "train.clip=1e-9", "augment.scale=[0.3333333333333333, 1]", "track.experiment=Zürich 🐟: #1",
         "data.root=none", "optimizer.lr=3e-7", "run.watch=none", "track.uri=None"],
    )  # fmt: skip
    assert (changed.run.watch, changed.track.uri) == (None, "none")
    for config in (load("digits", []), changed):
        assert from_yaml(config.to_yaml(), "config.yaml").to_yaml() == config.to_yaml()


def test_a_recipe_can_be_a_path_and_its_values_have_the_types_of_their_keys(write: Write) -> None:
    config = load(write(DIGITS), [])
    assert (config.recipe, config.run.dir, config.run_dir) == ("mine", "runs/mine", Path("runs/mine"))
    text = """run:
data: {source: digits}
optimizer: {lr: 1e-4, nesterov: yes}
model: {arch: 2024-01-01}
track: {experiment: no}
train: {epochs: 010}"""
    config = load(write(text), ["run.seed=3"])
    assert (config.optimizer.lr, config.optimizer.nesterov, config.run.seed) == (1e-4, True, 3)
    assert (config.model.arch, config.track.experiment, config.train.epochs) == ("2024-01-01", "no", 10)


def test_a_duration_is_read_in_every_unit_and_round_trips() -> None:
    for text, duration in {
        "0": Duration(0, "steps"), " 20 steps ": Duration(20, "steps"), "1step": Duration(1, "steps"),
        "2.5%": Duration(2.5, "%"), "0.000001 epochs": Duration(1e-6, "epochs"),
        "999999999.999999 epochs": Duration(999999999.999999, "epochs"),
    }.items():  # fmt: skip
        assert Duration.parse(text) == Duration.parse(str(duration)) == duration
    for text in ("10", "-1 steps", "1.5 steps", "1e3 steps", "5 minutes", "", "١ steps"):
        with pytest.raises(ValueError, match="not a duration"):
            Duration.parse(text)


def test_a_wrong_key_or_value_is_one_line_that_names_the_nearest_key_or_what_is_allowed() -> None:
    for given, named in {
        "train.epoch=3": "train.epochs", "lr=3": "optimizer.lr", "batch.global_=96": "batch.global",
        "qqq=1": "recipe, parallel, run", "train.epochs=ten": "1 to 1000000", "data.workers=1.5": "auto",
        "optimizer.lr=nan": "> 0 and ≤ 1000000", "run.trace=perhaps": "true | false",
        "optimizer.name=lion": "sgd | adamw | lamb | muon", "run.dir=": "string",
        "track.register=my model": "NAME@ALIAS", "evaluate.every=0": "above 0",
        "run.seed=9223372036854775808": "2^63−1", "profile.steps=[20]": "'profile.steps=[20, 24]'",
        "augment.scale=[0.1]": "2 values", "train.epochs.x=1": "train.epochs",
    }.items():  # fmt: skip
        line = refused("digits", given)
        assert line.startswith(given.partition("=")[0].removesuffix(".x"))
        assert named in line


def test_every_key_documents_itself_and_its_values() -> None:
    for key, (schema, _) in all_keys().items():
        given = "{1: b}" if key == "model.args" else "{a: b}"
        assert refused("digits", f"{key}={given}").startswith(f"{key}={{'{given[1]}': 'b'}} ")
        assert key == "recipe" or f"  {key}=" in describe_keys()
        assert schema["description"]


def test_a_yaml_null_means_the_default(write: Write) -> None:
    path = write("data: {source: digits}\n")
    before = load(path, []).to_yaml()
    optional = [key for key, (schema, _) in all_keys().items() if {"type": "null"} in schema.get("anyOf", [])]
    assert len(optional) > 15
    for key in (*optional, "track.uri", "run.resume"):
        for null in ("null", "~", ""):
            assert load(path, [f"{key}={null}"]).to_yaml() == before, key


def test_a_path_is_expanded_and_normalized(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = load("digits", ["run.dir=~/runs//x/", "data.root=~/./t4/", "track.uri=sqlite:///~/x.db"])
    assert (config.run.dir, config.data.root) == ("/home/me/runs/x", "/home/me/t4")
    assert config.track.uri == "sqlite:////home/me/x.db"
    assert load(write("data: {source: folder, root: ~/t4/}\n"), []).data.root == "/home/me/t4"
    for address in ("models:/digits@best", "s3://bucket//a/"):
        assert load("digits", [f"model.init={address}"]).model.init == address


def test_invalid_yaml_is_refused_in_one_line(write: Write) -> None:
    texts: dict[str | bytes, str] = {
        "a: [1, 2": "line 1 ", "a: b\n---\na: b": "mine.yaml", "- a\n- b": "no sections",
        "run:\n  seed: 1\n  seed: 2": "line 3 ", "batch: &a {global: 8}\ntrain: *a": "line 2 ",
        "? [a, b]\n: c": "line 1 ", 'run: {dir: "a\\0b"}': "run.dir=a\\x00b", '"\\ud800": 1': "'\\ud800'",
        'a: "\\UFFFFFFFF"': "mine.yaml", "[" * 5000: "mine.yaml", "a: " + "b" * 70_000: "64 KiB",
        b"\xff\xfe\x00": "UTF-8", b"a: \x00": "mine.yaml", "": "data.root",
        "data: {source: digits}\nmodel: resnet18\n": "model.arch, model.args, ",
    }  # fmt: skip
    for text, says in texts.items():
        assert says in refused(write(text))


def test_a_password_is_used_and_neither_written_nor_repeated() -> None:
    for uri, written in (
        ("https://user:hunter2@still:hunter2@host", "https://host"),
        ("postgresql+psycopg2://me:Zx9?/#hunter2@db/x?sslmode=require",
         "postgresql+psycopg2://db/x?sslmode=require"),
        ("postgresql://host/db?password=hunter2&sslmode=require", "postgresql://host/db?sslmode=require"),
        ("sqlite:////data/a@b/mlflow.db", "sqlite:////data/a@b/mlflow.db"),
    ):  # fmt: skip
        config = load("digits", [f"track.uri={uri}"])
        assert config.track.uri == uri
        assert yaml.safe_load(config.to_yaml())["track"]["uri"] == written
        assert "hunter2" not in config.to_yaml() + config.model_dump_json()
        assert "hunter2" not in refused("digits", f"track.urn={uri}")
    for value in ("me:hunter2@host", "http://me:hun hunter2@host", "s3://me:hunter2@bucket/x"):
        for key in ("track.uri=", "track.urn=", "data.source=", "batch.global=", ""):
            assert "hunter2" not in refused("digits", f"{key}{value}")


PLAIN = """
s3://bucket/team@corp/x s3://bucket/a:b@c http://host:5000/a@b?c=d@e#f@g https://[::1]:5000/a@b
sqlite:///a@b.db postgresql://host/db?options=a@b mlflow-artifacts://host:1/a@b file:///a@b
models:/digits@best /data/me@corp/x me@corp/x host:5000/a@b
"""
HIDDEN = {
    "http://u:p@s@[::1]:1/a": "http://[::1]:1/a", "http://me@host/a@b": "http://host/a@b",
    "mysql://h/db?pwd=a&passphrase=b&ssl=1": "mysql://h/db?ssl=1",
    "http://a:b@h,http://c:d@e": "http://h,http://e", "http://h/?to=http://u:p@x": "http://h/?to=http://x",
    "postgresql://u:5432/x@db/y": "postgresql://db/y", "mysql+pymysql://u:a@b/c@db/y": "mysql+pymysql://db/y",
    "https:/u:p@h/a@b": "https:/h/a@b", "x http://a:b/c@host:1 y s3:/d:e#f@b/x": "x http://host:1 y s3:/b/x",
}  # fmt: skip


def test_credentials_are_removed_and_an_at_sign_in_a_path_is_none() -> None:
    for uri in PLAIN.split():
        assert without_password(f"{uri} x") == f"{uri} x"
        assert hide_credentials(uri) == uri
        assert split_credentials(uri) == (uri, "", "")
    assert hide_credentials("s3://key:a b@bucket/team@corp") == "s3://bucket/team@corp"
    for uri, hidden in HIDDEN.items():
        assert without_password(uri) == hidden
    for password in ("Zx9/Qw+r", "Zx9%2FQw%2Br"):
        assert split_credentials(f"http://me:{password}@host:1/x") == ("http://host:1/x", "me", "Zx9/Qw+r")


@pytest.mark.fault("F5")
def test_allowed_changes_on_resume_pass_and_others_are_named() -> None:
    before = load("digits", ["data.root=data/t4/"])
    allowed = """run.dir=x run.resume=never run.trace=true run.watch=none data.workers=3 data.prefetch=4
        data.resident=off train.max_steps=5 train.epochs=13 checkpoint.every=3steps checkpoint.keep=9
        profile.steps=3-4 track.uri=none track.every=1epoch data.root=x data.max_bad=0.5 run.timeout=9"""
    refuse_changes(before, load("digits", allowed.split()))
    changes = {"run.seed=1": "0 -> 1", "batch.global=48": "96 -> 48", "data.val_split=0.2": "0.1 -> 0.2",
               "train.precision=bf16": "fp32 -> bf16", "train.epochs=11": "12 -> 11"}  # fmt: skip
    line = harness.refused(lambda: refuse_changes(before, load("digits", [*changes])))
    for word, values in changes.items():
        assert f"{word.partition('=')[0]}: {values}" in line


ODD = (
    "[", "]", "{", "}", "{a: b}", '"', "'", "\t", "\n", ": ", "- ", "? ", "&a ", "*a", "---", "...", "|", ">",
    "!!python/object:os.system ", "%YAML 9", "\0", "\x1b[31m", "\x85", "\u2028", "\ud800", '"\\UFFFFFFFF"',
    "[" * 4000, "9" * 5000, "!<x> ", "1e999", "nan", ".inf", "-1", "0x10", "1 parsec", "<<: ", "é", "\ufeff",
)  # fmt: skip


def mutate_text(rng: random.Random) -> str:
    text = DIGITS
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(DIGITS.index("data:"), len(text))
        text = text[:at] + rng.choice(ODD) + text[min(len(text), at + rng.choice((0, 1, 20))) :]
    return text


def mutate_type(rng: random.Random) -> str:
    tree = yaml.safe_load(DIGITS)
    sections = [inside for inside in tree.values() if isinstance(inside, dict)]
    place = rng.choice([tree, rng.choice(sections)])
    wrong = [["a"], {"a": {"b": "c"}}, "text", 3, {"": ""}, [[]], {"a" * 300: "b" * 300}]
    place[rng.choice(list(place))] = rng.choice(wrong)
    return yaml.safe_dump(tree)


@pytest.mark.fault("H1", ci=1, long=1)
def test_a_malformed_configuration_is_one_line(write: Write, seed: int, notes: Notes) -> None:
    rng = random.Random(seed)
    keys, lines = list(all_keys()), []
    for _ in range(100):
        malformed: list[tuple[str | bytes, list[str]]] = [
            (DIGITS, [f"{rng.choice(keys)}={rng.choice(ODD)}"]), (rng.randbytes(rng.randint(1, 200)), []),
            (mutate_type(rng), []), (mutate_text(rng), []),
        ]  # fmt: skip
        for text, overrides in malformed:
            try:
                load(write(text), overrides)  # for example a change in a comment
            except RequestError as refusal:
                lines.append(str(refusal))
    assert len(lines) >= 200
    notes.note("H1", times=200)
    for line in lines:
        assert len(line.splitlines()) == 1
        assert 10 < len(line) < 1000

"""The keys that training follows from: they must be the same on resume, and in all processes."""

from typing import Any

from pipeline.config.schema import Config
from pipeline.errors import RequestError

_MAY_CHANGE_ON_RESUME = (
    "recipe", "run.dir", "run.resume", "run.trace", "run.watch", "run.timeout", "data.root", "data.table",
    "data.cache", "data.cache_gib", "data.workers", "data.prefetch", "data.resident", "data.max_bad",
    "train.max_steps", "train.epochs", "checkpoint", "profile", "track",
)  # fmt: skip
"""Keys, and sections with all their keys, that may differ between a run and its resumption.

`data.root` and `data.table` may change: a digest shows if it is the same data. `train.epochs` may
only grow, see `refuse_changes`.
"""


def refuse_changes(before: Config, now: Config) -> None:
    """Raise RequestError if a key has changed that must not change on resume; name both values."""
    changed = differences(_fixed_keys(before), _fixed_keys(now))
    if now.train.epochs < before.train.epochs:
        epochs = f"train.epochs: {before.train.epochs} -> {now.train.epochs}"
        changed.append(f"{epochs} (it can only be increased)")
    if changed:
        what = f"the run in {now.run_dir} was started"
        mirror = " and checkpoint.mirror" if now.checkpoint.mirror else ""
        other = f"give another run.dir{mirror}, or "
        if now.run.resume != "auto":
            what = f"run.resume={now.run.resume} was trained"
            other = "or "
        problem = f"{what} with another configuration: {'; '.join(changed)}"
        raise RequestError(problem, f"restore these keys, {other}{now.start_again}")


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return `key: value before -> value now` for each key that differs."""
    keys = [key for key in before | now if before.get(key) != now.get(key)]
    return [f"{key}: {before.get(key, 'missing')} -> {now.get(key, 'missing')}" for key in keys]


def training_keys(config: Config) -> dict[str, Any]:
    """Return the keys that training follows from, in the form of `flatten`.

    These are the keys that must not change on resume, without the device, and train.epochs.
    """
    keys = _fixed_keys(config)
    del keys["run.device"]
    return keys | {"run.deterministic": config.is_deterministic, "train.epochs": config.train.epochs}


def flatten(config: Config) -> dict[str, Any]:
    """Return the configuration as {"section.key": value}."""
    flat: dict[str, Any] = {}
    for name, value in config.model_dump(mode="json", by_alias=True).items():
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            flat[name] = value
    return flat


def _fixed_keys(config: Config) -> dict[str, Any]:
    """Return the keys that must not change on resume, in the form of `flatten`."""
    keys = flatten(config) | {"run.portable": config.is_portable}
    if config.data.source == "pack":  # which keeps its orientation
        del keys["data.orientation"]
    return {key: keys[key] for key in keys if not {key, key.partition(".")[0]} & {*_MAY_CHANGE_ON_RESUME}}


def changes_to_recipe(config: Config, overrides: list[str]) -> str:
    """Return the overrides of what training follows from, as "key=value key=value"."""
    now, may_matter = flatten(config), {*_fixed_keys(config), "train.epochs", "train.max_steps"}
    given = dict.fromkeys(".".join(word.partition("=")[0].split(".")[:2]) for word in overrides)
    return " ".join(f"{key}={now[key]}" for key in given if key in may_matter)

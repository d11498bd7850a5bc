"""The sections of `config.schema.Config` that an update depends on, and no others."""

from typing import Protocol

from pipeline.config import sections


class Settings(Protocol):
    @property
    def run(self) -> sections.Run: ...
    @property
    def model(self) -> sections.Model: ...
    @property
    def checkpoint(self) -> sections.Checkpoint: ...
    @property
    def optimizer(self) -> sections.Optimizer: ...
    @property
    def train(self) -> sections.Train: ...

"""Bartlett's memory runtime: the part that people embed. Standard library and numpy only."""

from memory_runtime.clients import (
    RemoteEmbedder,
    RemoteEncoder,
    RemoteGenerator,
    RemoteReranker,
    Service,
    ServiceError,
)
from memory_runtime.config import MemoryConfig, load_config
from memory_runtime.errors import (
    ArtifactError,
    BartlettError,
    ConfigError,
    SchemaError,
    StoreError,
)
from memory_runtime.runtime import Added, Memory, Stats
from memory_runtime.schema import (
    Candidate,
    Kind,
    Layer,
    Scope,
    Scores,
    Slot,
    State,
    Turn,
    Window,
)

__all__ = [
    "Added",
    "ArtifactError",
    "BartlettError",
    "Candidate",
    "ConfigError",
    "Kind",
    "Layer",
    "Memory",
    "MemoryConfig",
    "RemoteEmbedder",
    "RemoteEncoder",
    "RemoteGenerator",
    "RemoteReranker",
    "SchemaError",
    "Scope",
    "Scores",
    "Service",
    "ServiceError",
    "Slot",
    "State",
    "Stats",
    "StoreError",
    "Turn",
    "Window",
    "load_config",
]

"""The exceptions that every part of Bartlett raises for faults of its input or its files."""


class BartlettError(Exception):
    """Root of all our own exceptions."""


class ConfigError(BartlettError):
    """A configuration is wrong; the message lists every fault at once."""


class SchemaError(BartlettError):
    """A value does not fit the schema of turns, candidates or memories."""


class ArtifactError(BartlettError):
    """A base, an adapter or a file of either is missing, damaged or does not fit."""


class StoreError(BartlettError):
    """The memory store cannot do what was asked, or its file is damaged."""

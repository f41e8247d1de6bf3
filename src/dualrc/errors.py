"""Exceptions for mistakes of a user; each message ends with the remedy."""


class DualRCError(Exception):
    """Base class of all errors that a user can cause and fix."""


class ImageError(DualRCError):
    """An image cannot be read or matched."""


class WeightsError(DualRCError):
    """Weights are missing, corrupt, or belong to another network."""


class ConfigError(DualRCError):
    """A setting is unknown or invalid."""


class DataError(DualRCError):
    """An input file other than an image or weights is unusable: matches, cameras, data sets."""


class OutputError(DualRCError):
    """A result cannot be written."""

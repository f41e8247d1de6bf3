"""Exceptions for mistakes that a user can make; each message ends with the remedy."""


class DualRCError(Exception):
    """The base of every error that a user can cause and mend."""


class ImageError(DualRCError):
    """A picture that can't be read or can't be matched."""


class WeightsError(DualRCError):
    """Weights that are missing, broken, or made for another network."""


class ConfigError(DualRCError):
    """A setting that is unknown or has no meaning."""


class DataError(DualRCError):
    """An input file other than a picture or weights that can't be used: matches, cameras, data sets."""


class OutputError(DualRCError):
    """A result that can't be written."""

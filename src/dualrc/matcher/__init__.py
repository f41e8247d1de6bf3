"""The matcher: images in, `Matches` out."""

from dualrc.matcher.extract import Precision
from dualrc.matcher.features import ImageFeatures
from dualrc.matcher.loading import load
from dualrc.matcher.matcher import Matcher

__all__ = ["ImageFeatures", "Matcher", "Precision", "load"]

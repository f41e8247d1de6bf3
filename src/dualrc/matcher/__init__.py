"""Pictures in, Matches out."""

from dualrc.matcher.features import PictureFeatures
from dualrc.matcher.matcher import Matcher, Precision, load

__all__ = ["Matcher", "PictureFeatures", "Precision", "load"]

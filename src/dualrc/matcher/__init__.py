"""Pictures in, Matches out."""

from dualrc.matcher.matcher import Matcher, PictureFeatures, Precision, load

__all__ = ["Matcher", "PictureFeatures", "Precision", "load"]

"""Matching with ONNX Runtime: `Matcher` runs exported models without torch, `dualrc.onnx.export` writes them."""

from dualrc.onnx.matcher import ImageFeatures, Matcher

__all__ = ["ImageFeatures", "Matcher"]

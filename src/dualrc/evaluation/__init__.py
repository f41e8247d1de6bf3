"""Benchmarks: matches are exported once and scored many times."""

from dualrc.evaluation.inloc import InLocSettings
from dualrc.evaluation.run import EvaluationSettings, evaluate, parse_crop

__all__ = ["EvaluationSettings", "InLocSettings", "evaluate", "parse_crop"]

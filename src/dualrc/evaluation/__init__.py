"""Benchmarks: matches are exported once and scored many times."""

from dualrc.evaluation.run import EvaluationSettings, evaluate, parse_crop

__all__ = ["EvaluationSettings", "evaluate", "parse_crop"]

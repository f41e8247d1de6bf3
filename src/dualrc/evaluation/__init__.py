"""Benchmarks; matches are stored once and can be scored many times."""

from dualrc.evaluation.aachen import Aachen
from dualrc.evaluation.appendix import Appendix
from dualrc.evaluation.benchmark import BENCHMARKS, Benchmark, register
from dualrc.evaluation.hard import Hard
from dualrc.evaluation.hpatches import HPatches
from dualrc.evaluation.inloc import InLoc
from dualrc.evaluation.pipeline import evaluate
from dualrc.evaluation.pose import Pose

__all__ = ["BENCHMARKS", "Benchmark", "evaluate", "register"]

# To add a benchmark, declare it in a new file and list it here.
register(HPatches, Hard, Pose, InLoc, Aachen, Appendix)

"""Procedural 3D scenes, rendered images of them, and exact pixel correspondences.

World units are meters with z up. A camera looks along its z axis with y down. numpy draws all random choices from the
seed, so a scene is the same on every device. Solids are convex and seen from outside.
"""

from dualrc.scenes.cast import View, look_at
from dualrc.scenes.pairs import (
    Correspondences,
    ScenePair,
    correspond,
    make_light,
    make_pair,
)
from dualrc.scenes.render import Light, Rendering, render
from dualrc.scenes.world import Scene, SceneKind, Solid, make_scene

__all__ = [
    "Correspondences",
    "Light",
    "Rendering",
    "Scene",
    "SceneKind",
    "ScenePair",
    "Solid",
    "View",
    "correspond",
    "look_at",
    "make_light",
    "make_pair",
    "make_scene",
    "render",
]

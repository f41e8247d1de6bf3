"""COLMAP's files; the only place that converts its pixel convention and its stored image orientation.

COLMAP puts the center of the first pixel at (0.5, 0.5); this package puts it at (0, 0). COLMAP's cameras are those of
images as they are stored; ours are those of images rotated upright according to their EXIF orientation.
"""

from dualrc.colmap.cameras import from_colmap_pixels, read_cameras
from dualrc.colmap.database import remove_leftovers, writing_database
from dualrc.colmap.model import Model, ModelImage, posed_reconstruction, read_model
from dualrc.colmap.upright import (
    colmap_camera,
    colmap_points,
    from_colmap_points,
    import_pycolmap,
    quiet_colmap,
    refuse_mirrored,
    stored_points,
    upright_from_stored,
)

__all__ = [
    "Model",
    "ModelImage",
    "colmap_camera",
    "colmap_points",
    "from_colmap_pixels",
    "from_colmap_points",
    "import_pycolmap",
    "posed_reconstruction",
    "quiet_colmap",
    "read_cameras",
    "read_model",
    "refuse_mirrored",
    "remove_leftovers",
    "stored_points",
    "upright_from_stored",
    "writing_database",
]

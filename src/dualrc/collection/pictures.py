"""The pictures of a folder, by name."""

from pathlib import Path

from dualrc.errors import DataError
from dualrc.image import SUFFIXES


def find_pictures(root: str | Path) -> list[str]:
    """Names of the pictures in a folder and its subfolders, relative to it, with "/" between folders, sorted.

    Hidden files are left out: some systems put thumbnails and notes beside pictures, under the pictures' names.
    """
    root = Path(root)
    if not root.is_dir():
        raise DataError(f"{root} is not a folder; give a folder of pictures.")
    paths = (path.relative_to(root) for path in root.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    names = sorted(path.as_posix() for path in paths if not any(part.startswith(".") for part in path.parts))
    if not names:
        raise DataError(f"{root} holds no pictures; give a folder with {', '.join(SUFFIXES)} files.")
    for name in names:
        # Control characters break lists of names, and bytes that are no text can't be stored.
        if any(ord(character) < 32 or 0xD800 <= ord(character) < 0xE000 for character in name):
            raise DataError(f"The file name {name!r} holds characters that are no text; rename the file.")
    return names

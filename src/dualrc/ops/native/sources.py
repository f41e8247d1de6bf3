"""Digest of the C sources, which a compiled library must match. setup.py uses this file too."""

import hashlib
from pathlib import Path


def digest() -> str:
    """Return the first 16 hexadecimal digits of a SHA-256 over names and contents of the C sources in this folder."""
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.[ch]")):
        # Git may convert line endings.
        found.update(path.name.encode() + b"\0" + path.read_bytes().replace(b"\r\n", b"\n") + b"\0")
    return found.hexdigest()[:16]

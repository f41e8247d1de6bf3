"""Which C sources these are: what was compiled into a library must be what lies beside it. Also used by setup.py."""

import hashlib
from pathlib import Path


def digest() -> str:
    """The first 16 hexadecimal digits of a SHA-256 of the C sources in this folder, by name and content."""
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.[ch]")):
        # Git may have changed the ends of lines.
        found.update(path.name.encode() + b"\0" + path.read_bytes().replace(b"\r\n", b"\n") + b"\0")
    return found.hexdigest()[:16]

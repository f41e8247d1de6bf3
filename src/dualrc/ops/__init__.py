"""Engines: faster forms of what `model/` defines, chosen once for a network and a device."""

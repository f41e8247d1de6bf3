"""Matching and reconstruction of image collections."""

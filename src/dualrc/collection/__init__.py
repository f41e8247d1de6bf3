"""Matches of whole collections of pictures."""

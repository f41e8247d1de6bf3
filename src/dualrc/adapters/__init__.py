"""Adapters: the matcher under the names and calls of other libraries, each of which is imported when it is used."""

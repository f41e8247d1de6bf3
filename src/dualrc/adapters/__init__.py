"""Adapters that offer the matcher through the interfaces of other libraries; each is imported on first use."""

# Generated from ../_async/__init__.py by scripts/sync-sdk; change that one.
"""The SDK with threads: generated from ``_async``."""

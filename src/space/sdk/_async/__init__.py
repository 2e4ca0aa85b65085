"""The SDK with asyncio: written by hand, and the source of ``_sync``."""

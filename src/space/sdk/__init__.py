"""The client library: `space.Sandbox` and its like. Import the names from `space`, not from here.

`_async` is written by hand, `_sync` is generated from it by ``scripts/sync-sdk``; what both share has no I/O and lies
here. The SDK knows the HTTP API and the attach protocol, and nothing of the server.
"""

"""Into servers of a sandbox: TCP connections through the guest's channel, HTTP and WebSocket over them, preview hosts.

``proxy.serve`` is what others call: one request, HTTP or an upgrade, to one port of one sandbox.
"""

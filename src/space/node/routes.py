"""The route table of the node: method, path, who may use it, and the function that answers."""

from space.node import http_commands, http_exec, http_files, http_machines, streams
from space.node.table import Access, Endpoint

LOCAL, SANDBOX, COMMAND = Access.LOCAL, Access.SANDBOX, Access.COMMAND

ROUTES: tuple[Endpoint, ...] = (
    Endpoint("GET", "/healthz", LOCAL, http_machines.healthz),
    Endpoint("GET", "/readyz", LOCAL, http_machines.readyz),
    Endpoint("GET", "/metrics", LOCAL, http_machines.metrics),
    Endpoint("PUT", "/token-key", LOCAL, http_machines.set_token_key),
    Endpoint("GET", "/templates", LOCAL, http_machines.templates),
    Endpoint("GET", "/doctor", LOCAL, http_machines.doctor),
    Endpoint("GET", "/machines", LOCAL, http_machines.list_machines),
    Endpoint("GET", "/machines/events", LOCAL, http_machines.events),
    Endpoint("GET", "/machines/{sandbox}", LOCAL, http_machines.inspect),
    Endpoint("PUT", "/machines/{sandbox}", LOCAL, http_machines.boot),
    Endpoint("DELETE", "/machines/{sandbox}", LOCAL, http_machines.destroy),
    Endpoint("POST", "/machines/{sandbox}/{verb}", LOCAL, http_machines.act),
    Endpoint("GET", "/v1/sandboxes/{sandbox}/metrics", SANDBOX, http_machines.usage),
    Endpoint("POST", "/v1/sandboxes/{sandbox}/exec", SANDBOX, http_exec.run),
    Endpoint("POST", "/v1/sandboxes/{sandbox}/commands", SANDBOX, http_commands.create),
    Endpoint("GET", "/v1/sandboxes/{sandbox}/commands", SANDBOX, http_commands.list_commands),
    Endpoint("GET", "/v1/commands/{command}", COMMAND, http_commands.show),
    Endpoint("GET", "/v1/commands/{command}/output", COMMAND, http_commands.output),
    Endpoint("POST", "/v1/commands/{command}/signal", COMMAND, http_commands.signal),
    Endpoint("POST", "/v1/commands/{command}/stdin", COMMAND, http_commands.stdin),
    Endpoint("WS", "/v1/commands/{command}/attach", COMMAND, streams.attach),
    Endpoint("GET", "/v1/sandboxes/{sandbox}/files", SANDBOX, http_files.read),
    Endpoint("PUT", "/v1/sandboxes/{sandbox}/files", SANDBOX, http_files.write),
    Endpoint("DELETE", "/v1/sandboxes/{sandbox}/files", SANDBOX, http_files.remove),
    Endpoint("GET", "/v1/sandboxes/{sandbox}/files/stat", SANDBOX, http_files.stat),
    Endpoint("GET", "/v1/sandboxes/{sandbox}/files/list", SANDBOX, http_files.list_directory),
    Endpoint("POST", "/v1/sandboxes/{sandbox}/files/mkdir", SANDBOX, http_files.mkdir),
    Endpoint("POST", "/v1/sandboxes/{sandbox}/files/move", SANDBOX, http_files.move),
    Endpoint("GET", "/v1/sandboxes/{sandbox}/files/archive", SANDBOX, http_files.read_archive),
    Endpoint("PUT", "/v1/sandboxes/{sandbox}/files/archive", SANDBOX, http_files.write_archive),
    Endpoint("GET", "/v1/sandboxes/{sandbox}/files/watch", SANDBOX, http_files.watch),
)

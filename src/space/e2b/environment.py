"""The variables that tell programs of E2B where they are. Pure."""

from space.model.sandbox import Sandbox


def variables(sandbox: Sandbox) -> dict[str, str]:
    """Return what every process that an E2B client starts finds in its environment."""
    return {"E2B_SANDBOX": "true", "E2B_SANDBOX_ID": sandbox.id, "E2B_TEMPLATE_ID": sandbox.template}

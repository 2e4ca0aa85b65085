"""Which policy a sandbox has: its own, else its template's, else its project's, else the installation's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import structlog
from sqlalchemy import Connection

from space.control.registries import registries
from space.model.policy import PRESETS, Policy, parse_policy, render_policy
from space.model.policy_fields import PolicyInvalid
from space.model.sandbox import State
from space.settings import Settings
from space.store import policies
from space.store.policies import Followed, Reference

log = structlog.get_logger(__name__)

Source = Literal["sandbox", "template", "project", "installation"]


@dataclass(frozen=True, slots=True)
class Chosen:
    """The policy that holds, and who says so. ``name`` is of a named one; one that is gone denies everything."""

    source: Source
    document: Mapping[str, Any] | str
    name: str | None = None

    def policy(self, settings: Settings) -> Policy:
        """Return it parsed; one that the installation's registries have made invalid since denies everything."""
        try:
            return parse_policy(self.document, registries(settings))
        except PolicyInvalid as error:
            log.warning("policy-not-valid", source=self.source, policy=self.name, field=error.field)
            return Policy()


def choose(settings: Settings, connection: Connection, followed: Followed) -> Chosen:
    """Return the policy that a sandbox has now."""
    ways: tuple[tuple[Source, Reference], ...] = (
        ("sandbox", followed.own),
        ("template", followed.details.get("template_policy")),
        ("project", followed.of_project),
    )
    for source, reference in ways:
        if reference is not None:
            return _meant(connection, followed.project_id, source, reference)
    return Chosen("installation", settings.egress_default_policy)


def choose_for_build(settings: Settings, connection: Connection, project_id: str, own: Reference) -> Chosen:
    """Return the policy of a machine that builds: the build's own, or the one that sandboxes have by default."""
    building = Followed("", project_id, State.RUNNING, own, {}, 1, policies.of_project(connection, project_id))
    return choose(settings, connection, building)


def shown(settings: Settings, chosen: Chosen) -> dict[str, Any]:
    """Return a policy in full, presets and all, as the gateway is told it."""
    return render_policy(chosen.policy(settings))


def _meant(connection: Connection, project_id: str, source: Source, reference: str | dict[str, Any]) -> Chosen:
    if not isinstance(reference, str) or reference in PRESETS:
        return Chosen(source, reference)
    named = policies.get(connection, project_id, reference)
    return Chosen(source, "none" if named is None else named.document, reference)

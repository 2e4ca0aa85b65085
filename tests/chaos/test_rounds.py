"""A few rounds of chaos and a short soak; `make chaos` and `make soak` run the long ones."""

import os
import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager

from tests.chaos.rounds import OPERATIONS, VICTIMS, Chaos
from tests.chaos.soak import soak
from tests.installation import Installation

ROUNDS = int(os.environ.get("SPACE_CHAOS_ROUNDS", "8"))
SEED = int(os.environ.get("SPACE_CHAOS_SEED", "0")) or secrets.randbelow(1_000_000)
SOAK_S = 30.0


def test_after_sigkill_of_anything_at_any_moment_nothing_is_lost_stuck_or_left(installation: Installation) -> None:
    """L12"""
    assert len(OPERATIONS) * len(VICTIMS) == 55
    tally = Chaos(installation, SEED).run(ROUNDS, say=print)
    print(f"seed {SEED}\n{tally}")
    assert tally.rounds == ROUNDS
    assert tally.problems == [], f"seed {SEED}\n{tally}"


def test_half_a_minute_of_changes_leaves_nothing_behind_and_nothing_grown(
    fresh_installation: Callable[..., AbstractContextManager[Installation]],
) -> None:
    with fresh_installation(log_level="warning", pool_max=2) as one:
        result = soak(one, SOAK_S, SEED)
    print(result)
    assert result.refused == []
    assert result.grown == []
    assert result.changes > SOAK_S * 2, f"{result.changes} changes are not a soak"

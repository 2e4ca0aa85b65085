"""docs/security.md says what the tests of what leaves a sandbox claim."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_table_of_claims_is_that_of_the_tests() -> None:
    done = subprocess.run([ROOT / "scripts/security-table", "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_claim_is_made_twice() -> None:
    rows = [line.split("|")[1] for line in (ROOT / "docs/security.md").read_text().splitlines() if line.startswith("|")]
    claims = [row for row in rows if len(row) > 10]
    assert len(claims) > 150
    assert [claim for claim in claims if claims.count(claim) > 1] == []

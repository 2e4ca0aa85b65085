"""Tests of what must not be possible. A package, so that its gateway is gone when others want the same addresses."""

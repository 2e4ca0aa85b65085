"""What leaves a sandbox. ``decide``, ``suggest``, ``inject``, ``scrub`` and ``sigv4`` are pure: they open no socket."""

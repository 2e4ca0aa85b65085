"""The agent inside the sandbox: its first process. Imports little, and late, to start fast."""

"""SPACE: isolated Linux machines for AI agents."""

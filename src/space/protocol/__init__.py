"""The language host and guest speak over any byte stream, without I/O. Standard library only."""

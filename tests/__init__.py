"""The test suite. Tests are named as properties."""

"""The programs of other people against a server process: `make clients`. Skipped where they are not installed."""

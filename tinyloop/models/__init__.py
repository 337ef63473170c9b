"""The model families: one file each, holding only what differs. `registry` finds the one that fits a checkpoint."""

"""Capacity planning: the server's own policy, admission and request code on virtual time.

    costs.py      what a step costs on a machine, kept as JSON
    calibrate.py  measures steps of a real engine
    fitting.py    makes costs of what was measured
    engine.py     the stepping engine's verbs over integers
    trace.py      who arrives when, with how many tokens
    replica.py    one server on virtual time; jumps over stretches that repeat themselves
    fleet.py      several of them, and the arrivals between them
    recorder.py   stands where the metrics do, and keeps what a report needs
    report.py     what came of it, as a table, JSON and a picture (plot.py)

Nothing in here imports torch; `calibrate` is handed an engine that has it.
"""

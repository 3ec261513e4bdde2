"""The real runtime compared with the graph: verify, bisect, and the causes of differences.

``runtimes/`` runs the exported file. ``runs.py`` runs both sides, with the file on a thread, and
``graph_runs.py`` the graph by itself, op by op and in float at once. ``verify.py`` compares their integers,
op by op and end to end. ``tallies.py`` compares the outputs of both with float's. ``bisect.py`` narrows a
difference down. ``crosscheck.py`` says what it looks like.
"""

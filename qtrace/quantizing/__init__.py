"""The stages in a row: from a network and data to a verdict, to a folder, or to a verified file.

``delivering.py`` writes, verifies and judges the file, and measures it next to the user's own file, or else
next to float. It is the one place where a clock decides. A file that is slower by more than 5 % beyond doubt
is replaced by the row above it, or by float. ``call_data.py`` cuts data into batches that are the same
whatever batches the user has made. ``sources.py`` opens the network as it was given, with which
``preparation/faithfulness.py`` compares the float graph.
"""
